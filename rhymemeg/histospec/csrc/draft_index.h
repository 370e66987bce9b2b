// Draft index of one rollout engine: a ContextIndex per prompt, and slots for the requests that are running.
//
// Thread-safe: every call holds one lock, except that `load` builds the prompt's index before it takes the lock, so
// histories can be loaded from several threads while drafting goes on.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "context_index.h"

namespace rhymemeg {

struct DraftBatch {
  std::vector<Token> tokens;          // drafts of all rows, one after another
  std::vector<std::int64_t> offsets;  // row i: tokens[offsets[i] : offsets[i + 1]]
  std::vector<std::int32_t> matches;  // per row
  std::vector<std::int32_t> occurrences;  // per row
  std::vector<float> probabilities;   // per token
};

class DraftIndex {
 public:
  using PromptId = std::int64_t;

  // A prompt's frozen documents: `context` is the tail of the prompt, shared by all `lengths.size()` responses in
  // `tokens`; `prompt` (may be empty) is a document of its own. Throws std::invalid_argument if the prompt is loaded.
  void load(PromptId prompt, const Token* context, std::size_t context_length, const Token* tokens, const std::int64_t* lengths,
            const float* weights, std::size_t responses, const Token* prompt_tokens, std::size_t prompt_length, float prompt_weight);

  // Starts a live document and returns its slot. A prompt that was never loaded starts empty.
  std::int32_t open(PromptId prompt, const Token* context, std::size_t context_length, float weight, bool searchable);

  // Appends tokens[offsets[i] : offsets[i + 1]] to slots[i]. Nothing changes if a slot or a token is invalid.
  void append(const std::int32_t* slots, const std::int64_t* offsets, std::size_t rows, const Token* tokens);

  // Drafts for slots[i] at most limits[i] tokens.
  void draft(const std::int32_t* slots, const std::int32_t* limits, std::size_t rows, const DraftOptions& options, DraftBatch& out) const;

  // The slot may be reused; what was appended stays a document of its prompt.
  void close(std::int32_t slot);

  // Forgets a prompt with all its documents; its open slots are closed. Unknown prompts are ignored.
  void release(PromptId prompt);

  bool has(PromptId prompt) const;
  std::size_t num_prompts() const;
  std::size_t num_open() const;
  std::size_t num_tokens() const;
  std::size_t memory_bytes() const;

 private:
  struct Slot {
    ContextIndex* index = nullptr;  // null: free
    PromptId prompt = 0;
    std::uint32_t document = 0;
  };
  const Slot& open_slot(std::int32_t slot) const;

  mutable std::mutex mutex_;
  std::unordered_map<PromptId, std::unique_ptr<ContextIndex>> prompts_;
  std::vector<Slot> slots_;
  std::vector<std::int32_t> free_;
};

}  // namespace rhymemeg
