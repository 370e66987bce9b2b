// Context index of one prompt: finds where the tail of a growing response occurred before in the prompt's documents
// (last visit's responses, the prompt itself, live siblings), longest match first.
//
// Structure. A *context* is a position of a document read backwards: the token there, the one before it, and so on. All
// positions that have a successor are kept sorted by their contexts, in blocks of at most kBlock entries under one sorted
// directory (a two-level B+ tree). In that order the occurrences of any suffix of a query are neighbours of the place where
// the query itself would stand, those with the longest common context nearest to it. So one binary search answers a
// query, and the same search inserts a new position: growing siblings and loaded history are one structure.
//
// Cost. Search and insertion: O(log n) comparisons, each resumed at the common length already established (Manber and
// Myers, 1993), so that long repeats cost one scan. Memory: 4 bytes a token for the text and 4 / fill for the entry.
// Contexts are compared over at most kMaxContext tokens, which bounds the worst case (one token repeated for ever);
// positions that agree that far count as equal and stand in the order in which they were added.
//
// Everything is a pure function of the sequence of calls: equal calls on several tensor-parallel ranks give equal drafts.
// Not thread-safe; DraftIndex locks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace rhymemeg {

using Token = std::int32_t;
constexpr Token kMaxToken = (1 << 21) - 2;  // three tokens share a 64-bit key

struct DraftOptions {
  int min_match = 1;                  // shortest suffix that may be drafted from
  int max_match = 64;                 // longer agreement makes no difference
  int max_occurrences = 64;           // occurrences that vote on branches; beyond it the best-matching ones
  float min_path_probability = 0.0f;  // stop before a token whose path holds less of the occurrences' count
};

struct Draft {
  int match = 0;                     // length of the suffix that the occurrences share with the query; 0: no draft
  int occurrences = 0;               // how many voted
  std::vector<Token> tokens;         // the drafted continuation
  std::vector<float> probabilities;  // share of the occurrences on the path up to and including each token
};

class ContextIndex {
 public:
  static constexpr int kMaxContext = 64;
  static constexpr int kOffsetBits = 20;
  static constexpr std::uint32_t kMaxLength = 1u << kOffsetBits;
  static constexpr std::uint32_t kMaxDocuments = 1u << (32 - kOffsetBits);

  // Starts a document with `context`, tokens that precede its first own token (the prompt's tail) and are never drafted.
  // `weight` is the document's vote on branches. A document that is not `searchable` only asks and never answers.
  std::uint32_t add_document(const Token* context, std::size_t n, float weight, bool searchable);

  // Appends own tokens. Throws std::length_error before changing anything if the document would exceed kMaxLength.
  void append(std::uint32_t document, const Token* tokens, std::size_t n);

  // Room for `n` more tokens exactly, where the final length is known.
  void reserve(std::uint32_t document, std::size_t n);

  // Sorts the positions of all documents at once; allowed only while nothing was inserted one by one. Faster than append
  // and packs the blocks. Documents for it are filled by append_unsorted.
  void append_unsorted(std::uint32_t document, const Token* tokens, std::size_t n);
  void sort_all();

  // Drafts up to `limit` tokens that may follow `document`'s end. Leaves `out` empty where nothing matches.
  void draft(std::uint32_t document, int limit, const DraftOptions& options, Draft& out) const;

  std::size_t num_documents() const { return documents_.size(); }
  std::size_t length(std::uint32_t document) const { return documents_[document].tokens.size(); }
  std::size_t num_tokens() const { return num_tokens_; }    // context and own tokens of all documents
  std::size_t num_entries() const { return num_entries_; }  // sorted positions
  std::size_t memory_bytes() const;

 private:
  using Entry = std::uint32_t;  // document << kOffsetBits | offset
  static constexpr Entry kOffsetMask = kMaxLength - 1;
  static constexpr std::uint32_t kBlock = 64;
  static constexpr std::uint32_t kSlab = 8;

  struct Document {
    std::vector<Token> tokens;
    std::uint32_t context = 0;  // leading tokens that are not the document's own
    float weight = 0;
    bool searchable = true;
  };
  struct Block {
    std::uint32_t size;
    Entry entries[kBlock];
  };
  // The last three tokens of a context, 21 bits each, ordered as the context is: most comparisons end here, without a
  // look at the text.
  using Key = std::uint64_t;
  struct Child {  // directory: a block and its first entry
    Key key;
    Entry first;
    std::uint32_t block;
  };
  struct Query {
    const Token* last;
    int length;
    Key key;
    bool inserting;  // ties: a new entry goes after its equals, a query stands before them
  };
  struct Place {
    std::size_t child;        // index into directory_
    std::uint32_t slot;       // position in the block; may equal its size
    int before, after;        // common context with the neighbours on both sides
  };

  Block& block(std::uint32_t index) const { return slabs_[index / kSlab][index % kSlab]; }
  Query query_at(std::uint32_t document, std::size_t offset, bool inserting) const;
  int compare(const Query& query, Entry entry, int& common) const;
  Place find(const Query& query) const;
  void insert(std::uint32_t document, std::size_t offset);
  Child make_child(Entry first, std::uint32_t block) const;
  static Key make_key(const Token* last, int length);
  std::uint32_t new_block();
  Token back(Entry entry, int depth) const;
  void sort_range(Entry* begin, Entry* end, int depth) const;
  int gather(const Query& query, const Place& place, const DraftOptions& options, std::vector<Entry>& out) const;

  std::vector<Document> documents_;
  std::vector<const Token*> text_;  // documents_[d].tokens.data(), dense for the comparisons
  std::vector<Child> directory_;
  std::vector<std::unique_ptr<Block[]>> slabs_;
  std::uint32_t num_blocks_ = 0;
  std::size_t num_tokens_ = 0;
  std::size_t num_entries_ = 0;
};

}  // namespace rhymemeg
