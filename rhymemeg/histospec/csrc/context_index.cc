#include "context_index.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace rhymemeg {

std::uint32_t ContextIndex::add_document(const Token* context, std::size_t n, float weight, bool searchable) {
  if (documents_.size() >= kMaxDocuments) {
    throw std::length_error("a prompt holds at most " + std::to_string(kMaxDocuments) + " documents");
  }
  if (n >= kMaxLength) {
    throw std::length_error("a document holds at most " + std::to_string(kMaxLength - 1) + " tokens");
  }
  Document document;
  document.tokens.assign(context, context + n);
  document.context = static_cast<std::uint32_t>(n);
  document.weight = weight;
  document.searchable = searchable;
  documents_.push_back(std::move(document));
  text_.push_back(documents_.back().tokens.data());
  num_tokens_ += n;
  return static_cast<std::uint32_t>(documents_.size() - 1);
}

void ContextIndex::reserve(std::uint32_t document, std::size_t n) {
  auto& tokens = documents_[document].tokens;
  tokens.reserve(tokens.size() + n);
  text_[document] = tokens.data();
}

void ContextIndex::append_unsorted(std::uint32_t document, const Token* tokens, std::size_t n) {
  auto& text = documents_[document].tokens;
  if (text.size() + n >= kMaxLength) {
    throw std::length_error("a document holds at most " + std::to_string(kMaxLength - 1) + " tokens");
  }
  text.insert(text.end(), tokens, tokens + n);
  text_[document] = text.data();
  num_tokens_ += n;
}

void ContextIndex::append(std::uint32_t document, const Token* tokens, std::size_t n) {
  const std::size_t old = documents_[document].tokens.size();
  append_unsorted(document, tokens, n);
  const Document& d = documents_[document];
  if (!d.searchable) return;
  // A position enters the order when its successor is known, so every entry has something to draft. Positions inside
  // the context are left out: what follows them is not the document's own.
  for (std::size_t i = std::max<std::size_t>(old, std::max<std::size_t>(d.context, 1)); i < old + n; ++i) insert(document, i - 1);
}

// ------------------------------------------------------------------------------------------------------------- order

ContextIndex::Query ContextIndex::query_at(std::uint32_t document, std::size_t offset, bool inserting) const {
  const Token* last = text_[document] + offset;
  const int length = static_cast<int>(std::min<std::size_t>(offset + 1, kMaxContext));
  return {last, length, make_key(last, length), inserting};
}

// Sign of (query - entry) in the order of contexts. `common` goes in as a length known to agree, comes out exact.
int ContextIndex::compare(const Query& query, Entry entry, int& common) const {
  const std::size_t offset = entry & kOffsetMask;
  const Token* last = text_[entry >> kOffsetBits] + offset;
  const int length = static_cast<int>(std::min<std::size_t>(offset + 1, kMaxContext));
  const int limit = std::min(query.length, length);
  int i = common;
  while (i < limit && query.last[-i] == last[-i]) ++i;
  common = i;
  if (i < limit) return query.last[-i] < last[-i] ? -1 : 1;
  if (query.length != length) return query.length < length ? -1 : 1;  // the shorter context comes first
  return query.inserting ? 1 : -1;
}

ContextIndex::Place ContextIndex::find(const Query& query) const {
  int before = 0, after = 0;
  std::size_t low = 0, high = directory_.size();
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    const Child& child = directory_[middle];
    int common, sign;
    if (query.key != child.key) {
      const Key differ = query.key ^ child.key;
      common = differ >> 42 ? 0 : differ >> 21 ? 1 : 2;
      sign = query.key < child.key ? -1 : 1;
    } else {
      common = std::min(before, after);
      sign = compare(query, child.first, common);
    }
    if (sign < 0) {
      high = middle;
      after = common;
    } else {
      low = middle + 1;
      before = common;
    }
  }
  if (low == 0) return {0, 0, 0, after};
  const std::size_t child = low - 1;
  const Block& found = block(directory_[child].block);
  std::uint32_t left = 1, right = found.size;
  // The text of the first probes below is fetched at once, not one after another.
  for (const std::uint32_t probe : {(1 + right) / 2, (1 + right) / 4, (1 + 3 * right) / 4}) {
    if (probe < right) __builtin_prefetch(text_[found.entries[probe] >> kOffsetBits] + (found.entries[probe] & kOffsetMask));
  }
  while (left < right) {
    const std::uint32_t middle = (left + right) / 2;
    int common = std::min(before, after);
    if (compare(query, found.entries[middle], common) < 0) {
      right = middle;
      after = common;
    } else {
      left = middle + 1;
      before = common;
    }
  }
  return {child, left, before, after};
}

ContextIndex::Key ContextIndex::make_key(const Token* last, int length) {
  Key key = 0;
  for (int i = 0; i < 3; ++i) key = key << 21 | static_cast<Key>(i < length ? last[-i] + 1 : 0);
  return key;
}

ContextIndex::Child ContextIndex::make_child(Entry first, std::uint32_t block) const {
  const std::uint32_t offset = first & kOffsetMask;
  return {make_key(text_[first >> kOffsetBits] + offset, static_cast<int>(std::min(offset + 1, 3u))), first, block};
}

std::uint32_t ContextIndex::new_block() {
  if (num_blocks_ == slabs_.size() * kSlab) slabs_.push_back(std::unique_ptr<Block[]>(new Block[kSlab]));
  block(num_blocks_).size = 0;
  return num_blocks_++;
}

void ContextIndex::insert(std::uint32_t document, std::size_t offset) {
  const Entry entry = document << kOffsetBits | static_cast<Entry>(offset);
  ++num_entries_;
  if (directory_.empty()) {
    const std::uint32_t index = new_block();
    block(index).entries[0] = entry;
    block(index).size = 1;
    directory_.push_back(make_child(entry, index));
    return;
  }
  Place place = find(query_at(document, offset, true));
  if (block(directory_[place.child].block).size == kBlock) {
    const std::uint32_t index = new_block();
    Block& full = block(directory_[place.child].block);
    Block& upper = block(index);
    upper.size = kBlock / 2;
    full.size = kBlock - upper.size;
    std::memcpy(upper.entries, full.entries + full.size, upper.size * sizeof(Entry));
    directory_.insert(directory_.begin() + static_cast<std::ptrdiff_t>(place.child) + 1, make_child(upper.entries[0], index));
    if (place.slot > full.size) {
      place.slot -= full.size;
      ++place.child;
    }
  }
  Child& child = directory_[place.child];
  Block& target = block(child.block);
  std::memmove(target.entries + place.slot + 1, target.entries + place.slot, (target.size - place.slot) * sizeof(Entry));
  target.entries[place.slot] = entry;
  ++target.size;
  if (place.slot == 0) child = make_child(entry, child.block);
}

// ---------------------------------------------------------------------------------------------------------- bulk load

// The token `depth` places back from the entry, or -1 where its context has ended.
Token ContextIndex::back(Entry entry, int depth) const {
  const std::uint32_t offset = entry & kOffsetMask;
  return offset >= static_cast<std::uint32_t>(depth) ? text_[entry >> kOffsetBits][offset - static_cast<std::uint32_t>(depth)] : -1;
}

// Multikey quicksort (Bentley and Sedgewick, 1997) by the token at `depth`; equal contexts in order of entry.
void ContextIndex::sort_range(Entry* begin, Entry* end, int depth) const {
  while (end - begin > 1) {
    if (depth == kMaxContext) {
      std::sort(begin, end);
      return;
    }
    if (end - begin <= 12) {
      const auto less = [this, depth](Entry a, Entry b) {
        for (int i = depth; i < kMaxContext; ++i) {
          const Token x = back(a, i), y = back(b, i);
          if (x != y) return x < y;
          if (x < 0) break;
        }
        return a < b;
      };
      for (Entry* i = begin + 1; i < end; ++i) {
        const Entry entry = *i;
        Entry* j = i;
        for (; j > begin && less(entry, j[-1]); --j) *j = j[-1];
        *j = entry;
      }
      return;
    }
    const Token a = back(begin[0], depth), b = back(begin[(end - begin) / 2], depth), c = back(end[-1], depth);
    const Token pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    Entry *less = begin, *greater = end, *i = begin;
    while (i < greater) {
      const Token token = back(*i, depth);
      if (token < pivot) {
        std::swap(*less++, *i++);
      } else if (token > pivot) {
        std::swap(*i, *--greater);
      } else {
        ++i;
      }
    }
    sort_range(begin, less, depth);
    sort_range(greater, end, depth);
    if (pivot < 0) {  // all these contexts have ended: equal
      std::sort(less, greater);
      return;
    }
    begin = less;
    end = greater;
    ++depth;
  }
}

void ContextIndex::sort_all() {
  if (num_entries_ != 0) throw std::logic_error("sort_all: the index already has sorted positions");
  std::vector<Entry> order;
  std::size_t total = 0;
  for (const Document& d : documents_) total += d.searchable ? d.tokens.size() : 0;
  order.reserve(total);
  for (std::uint32_t d = 0; d < documents_.size(); ++d) {
    const Document& document = documents_[d];
    if (!document.searchable) continue;
    for (std::size_t i = std::max<std::size_t>(document.context, 1); i < document.tokens.size(); ++i) {
      order.push_back(d << kOffsetBits | static_cast<Entry>(i - 1));
    }
  }
  sort_range(order.data(), order.data() + order.size(), 0);
  num_entries_ = order.size();
  // Blocks start seven eighths full: insertions of live siblings find room, the memory is near the densest.
  constexpr std::size_t fill = kBlock - kBlock / 8;
  directory_.reserve(order.size() / fill + 1);
  for (std::size_t i = 0; i < order.size(); i += fill) {
    const std::uint32_t index = new_block();
    Block& target = block(index);
    target.size = static_cast<std::uint32_t>(std::min(fill, order.size() - i));
    std::memcpy(target.entries, order.data() + i, target.size * sizeof(Entry));
    directory_.push_back(make_child(target.entries[0], index));
  }
}

// -------------------------------------------------------------------------------------------------------------- drafts

// Collects the occurrences that share the longest suffix with the query, nearest (best matching) first. Returns its
// length, at most max_match, or 0 if it is shorter than min_match.
int ContextIndex::gather(const Query& query, const Place& place, const DraftOptions& options, std::vector<Entry>& out) const {
  const int match = std::min(std::max(place.before, place.after), options.max_match);
  if (match < std::max(options.min_match, 1)) return 0;
  std::size_t left_child = place.child, right_child = place.child;
  std::uint32_t left_slot = place.slot, right_slot = place.slot;
  int left = place.before, right = place.after;
  const auto wanted = static_cast<std::size_t>(std::max(options.max_occurrences, 1));
  while (out.size() < wanted && std::max(left, right) >= match) {
    if (right >= left) {
      while (right_slot == block(directory_[right_child].block).size) {
        ++right_child;
        right_slot = 0;
      }
      out.push_back(block(directory_[right_child].block).entries[right_slot++]);
      while (right_child < directory_.size() && right_slot == block(directory_[right_child].block).size) {
        ++right_child;
        right_slot = 0;
      }
      if (right_child == directory_.size()) {
        right = -1;
      } else {
        int common = 0;
        compare(query, block(directory_[right_child].block).entries[right_slot], common);
        right = common;
      }
    } else {
      while (left_slot == 0) left_slot = block(directory_[--left_child].block).size;
      out.push_back(block(directory_[left_child].block).entries[--left_slot]);
      if (left_slot == 0 && left_child == 0) {
        left = -1;
      } else {
        std::size_t child = left_child;
        std::uint32_t slot = left_slot;
        if (slot == 0) slot = block(directory_[--child].block).size;
        int common = 0;
        compare(query, block(directory_[child].block).entries[slot - 1], common);
        left = common;
      }
    }
  }
  return match;
}

void ContextIndex::draft(std::uint32_t document, int limit, const DraftOptions& options, Draft& out) const {
  out.match = 0;
  out.occurrences = 0;
  out.tokens.clear();
  out.probabilities.clear();
  const std::size_t length = documents_[document].tokens.size();
  if (limit <= 0 || length == 0 || directory_.empty()) return;
  const Query query = query_at(document, length - 1, false);
  thread_local std::vector<Entry> found;
  found.clear();
  const int match = gather(query, find(query), options, found);
  if (match == 0) return;

  struct Branch {
    Token token;
    std::uint32_t count;
    double weight;
  };
  struct Walker {
    const Token* next;
    const Token* end;
    float weight;
  };
  thread_local std::vector<Walker> walkers;
  thread_local std::vector<Branch> branches;
  walkers.clear();
  for (const Entry entry : found) {
    const Document& d = documents_[entry >> kOffsetBits];
    const Token* text = d.tokens.data();
    walkers.push_back({text + (entry & kOffsetMask) + 1, text + d.tokens.size(), d.weight});
  }
  // At each fork the occurrences vote with their documents' weights; where no branch has a positive sum they are counted.
  // Ties go to the higher count, then to the branch of the better matching occurrence.
  double path = 1.0;
  while (static_cast<int>(out.tokens.size()) < limit && !walkers.empty()) {
    branches.clear();
    for (const Walker& walker : walkers) {
      const Token token = *walker.next;
      auto branch = std::find_if(branches.begin(), branches.end(), [token](const Branch& b) { return b.token == token; });
      if (branch == branches.end()) {
        branches.push_back({token, 1, walker.weight});
      } else {
        ++branch->count;
        branch->weight += walker.weight;
      }
    }
    const Branch* best = &branches[0];
    if (branches.size() > 1) {
      bool positive = false;
      for (const Branch& branch : branches) positive = positive || branch.weight > 0;
      for (const Branch& branch : branches) {
        const bool better = positive && branch.weight != best->weight ? branch.weight > best->weight : branch.count > best->count;
        if (better) best = &branch;
      }
      path *= static_cast<double>(best->count) / static_cast<double>(walkers.size());
    }
    if (path < options.min_path_probability) break;
    const Token chosen = best->token;
    out.tokens.push_back(chosen);
    out.probabilities.push_back(static_cast<float>(path));
    std::size_t kept = 0;
    for (const Walker& walker : walkers) {
      if (*walker.next == chosen && walker.next + 1 != walker.end) walkers[kept++] = {walker.next + 1, walker.end, walker.weight};
    }
    walkers.resize(kept);
  }
  if (!out.tokens.empty()) {
    out.match = match;
    out.occurrences = static_cast<int>(found.size());
  }
}

std::size_t ContextIndex::memory_bytes() const {
  std::size_t bytes = sizeof(*this) + documents_.capacity() * sizeof(Document) + text_.capacity() * sizeof(Token*);
  for (const Document& d : documents_) bytes += d.tokens.capacity() * sizeof(Token);
  bytes += directory_.capacity() * sizeof(Key) + slabs_.capacity() * sizeof(slabs_[0]) + slabs_.size() * kSlab * sizeof(Block);
  return bytes;
}

}  // namespace rhymemeg
