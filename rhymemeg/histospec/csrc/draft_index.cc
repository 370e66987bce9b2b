#include "draft_index.h"

#include <stdexcept>
#include <string>

namespace rhymemeg {
namespace {

void check_tokens(const Token* tokens, std::size_t n, const char* what) {
  for (std::size_t i = 0; i < n; ++i) {
    if (tokens[i] < 0 || tokens[i] > kMaxToken) {
      throw std::invalid_argument(std::string(what) + ": token " + std::to_string(tokens[i]) + " at position " + std::to_string(i) +
                                  " is outside [0, " + std::to_string(kMaxToken) + "]");
    }
  }
}

}  // namespace

void DraftIndex::load(PromptId prompt, const Token* context, std::size_t context_length, const Token* tokens,
                      const std::int64_t* lengths, const float* weights, std::size_t responses, const Token* prompt_tokens,
                      std::size_t prompt_length, float prompt_weight) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < responses; ++i) total += static_cast<std::size_t>(lengths[i]);
  check_tokens(context, context_length, "context");
  check_tokens(tokens, total, "responses");
  check_tokens(prompt_tokens, prompt_length, "prompt");
  auto index = std::make_unique<ContextIndex>();
  if (prompt_length > 0) {
    index->append_unsorted(index->add_document(nullptr, 0, prompt_weight, true), prompt_tokens, prompt_length);
  }
  for (std::size_t i = 0; i < responses; ++i) {
    const auto n = static_cast<std::size_t>(lengths[i]);
    const std::uint32_t document = index->add_document(context, context_length, weights[i], true);
    index->reserve(document, n);
    index->append_unsorted(document, tokens, n);
    tokens += n;
  }
  index->sort_all();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!prompts_.emplace(prompt, std::move(index)).second) {
    throw std::invalid_argument("prompt " + std::to_string(prompt) + " is loaded already; release it first");
  }
}

std::int32_t DraftIndex::open(PromptId prompt, const Token* context, std::size_t context_length, float weight, bool searchable) {
  check_tokens(context, context_length, "context");
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& index = prompts_[prompt];
  if (!index) index = std::make_unique<ContextIndex>();
  const std::uint32_t document = index->add_document(context, context_length, weight, searchable);
  std::int32_t slot;
  if (free_.empty()) {
    slot = static_cast<std::int32_t>(slots_.size());
    slots_.emplace_back();
  } else {
    slot = free_.back();
    free_.pop_back();
  }
  slots_[static_cast<std::size_t>(slot)] = {index.get(), prompt, document};
  return slot;
}

const DraftIndex::Slot& DraftIndex::open_slot(std::int32_t slot) const {
  if (slot < 0 || static_cast<std::size_t>(slot) >= slots_.size() || slots_[static_cast<std::size_t>(slot)].index == nullptr) {
    throw std::out_of_range("slot " + std::to_string(slot) + " is not open");
  }
  return slots_[static_cast<std::size_t>(slot)];
}

void DraftIndex::append(const std::int32_t* slots, const std::int64_t* offsets, std::size_t rows, const Token* tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t i = 0; i < rows; ++i) {
    const Slot& slot = open_slot(slots[i]);
    const auto n = static_cast<std::size_t>(offsets[i + 1] - offsets[i]);
    check_tokens(tokens + offsets[i], n, "append");
    if (slot.index->length(slot.document) + n >= ContextIndex::kMaxLength) {
      throw std::length_error("slot " + std::to_string(slots[i]) + ": a document holds at most " +
                              std::to_string(ContextIndex::kMaxLength - 1) + " tokens");
    }
  }
  for (std::size_t i = 0; i < rows; ++i) {
    const Slot& slot = open_slot(slots[i]);
    slot.index->append(slot.document, tokens + offsets[i], static_cast<std::size_t>(offsets[i + 1] - offsets[i]));
  }
}

void DraftIndex::draft(const std::int32_t* slots, const std::int32_t* limits, std::size_t rows, const DraftOptions& options,
                       DraftBatch& out) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  out.offsets.assign(1, 0);
  out.matches.clear();
  out.occurrences.clear();
  out.tokens.clear();
  out.probabilities.clear();
  Draft row;
  for (std::size_t i = 0; i < rows; ++i) {
    const Slot& slot = open_slot(slots[i]);
    slot.index->draft(slot.document, limits[i], options, row);
    out.tokens.insert(out.tokens.end(), row.tokens.begin(), row.tokens.end());
    out.probabilities.insert(out.probabilities.end(), row.probabilities.begin(), row.probabilities.end());
    out.matches.push_back(row.match);
    out.occurrences.push_back(row.occurrences);
    out.offsets.push_back(static_cast<std::int64_t>(out.tokens.size()));
  }
}

void DraftIndex::close(std::int32_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_slot(slot);
  slots_[static_cast<std::size_t>(slot)].index = nullptr;
  free_.push_back(slot);
}

void DraftIndex::release(PromptId prompt) {
  std::unique_ptr<ContextIndex> gone;  // freed after the lock is
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = prompts_.find(prompt);
  if (found == prompts_.end()) return;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].index == found->second.get()) {
      slots_[i].index = nullptr;
      free_.push_back(static_cast<std::int32_t>(i));
    }
  }
  gone = std::move(found->second);
  prompts_.erase(found);
}

bool DraftIndex::has(PromptId prompt) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return prompts_.count(prompt) != 0;
}

std::size_t DraftIndex::num_prompts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return prompts_.size();
}

std::size_t DraftIndex::num_open() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return slots_.size() - free_.size();
}

std::size_t DraftIndex::num_tokens() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t total = 0;
  for (const auto& item : prompts_) total += item.second->num_tokens();
  return total;
}

std::size_t DraftIndex::memory_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::size_t total = sizeof(*this) + slots_.capacity() * sizeof(Slot) + free_.capacity() * sizeof(std::int32_t);
  for (const auto& item : prompts_) total += item.second->memory_bytes() + sizeof(item);
  return total;
}

}  // namespace rhymemeg
