// Token ids at a fixed number of bits each, lowest bits first: the history buffer's storage. 18 bits hold a vocabulary of
// 151,936, that is 2.25 bytes a token.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace rhymemeg {

inline std::size_t packed_size(std::size_t n, int bits) { return (n * static_cast<std::size_t>(bits) + 7) / 8; }

// `out` has packed_size(n, bits) bytes. Throws std::invalid_argument naming the first id outside [0, limit).
inline void pack_bits(const std::int32_t* tokens, std::size_t n, int bits, std::int64_t limit, std::uint8_t* out) {
  std::uint64_t pending = 0;
  int filled = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (tokens[i] < 0 || tokens[i] >= limit) {
      throw std::invalid_argument("token id " + std::to_string(tokens[i]) + " at position " + std::to_string(i) +
                                  " is outside the vocabulary of " + std::to_string(limit));
    }
    pending |= static_cast<std::uint64_t>(tokens[i]) << filled;
    filled += bits;
    for (; filled >= 8; filled -= 8, pending >>= 8) *out++ = static_cast<std::uint8_t>(pending);
  }
  if (filled > 0) *out = static_cast<std::uint8_t>(pending);
}

inline void unpack_bits(const std::uint8_t* packed, std::size_t n, int bits, std::int32_t* out) {
  const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
  std::uint64_t pending = 0;
  int filled = 0;
  for (std::size_t i = 0; i < n; ++i) {
    for (; filled < bits; filled += 8) pending |= static_cast<std::uint64_t>(*packed++) << filled;
    out[i] = static_cast<std::int32_t>(pending & mask);
    pending >>= bits;
    filled -= bits;
  }
}

}  // namespace rhymemeg
