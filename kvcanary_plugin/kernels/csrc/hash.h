// The hashes of the byte contract, for host and device. No framework in here.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KVCANARY_HD __host__ __device__ __forceinline__
#else
#define KVCANARY_HD inline
#endif

namespace kvcanary {

constexpr uint64_t kChainAnchor = 0xC0FFEE1234567890ULL;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;

// The finaliser of splitmix64; nothing is added to x first.
KVCANARY_HD uint64_t splitmix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

KVCANARY_HD uint64_t splitmix64_mix3(uint64_t a, uint64_t b, uint64_t c) {
  return splitmix64(splitmix64(splitmix64(a) ^ b) ^ c);
}

// The running hash before the first token of a sequence; key 0 means "no identity key".
KVCANARY_HD uint64_t chain_start(uint64_t identity_key) {
  return splitmix64(kChainAnchor ^ identity_key);
}

// The part of a word's key that depends on its source only.
KVCANARY_HD uint64_t source_key(uint64_t source_index) { return splitmix64(source_index + 1); }

// One little-endian 8-byte word's share of the fold; shares add up modulo 2^64.
KVCANARY_HD uint64_t fold_word(uint64_t word, uint64_t source_key_value, uint64_t word_index) {
  return splitmix64(word ^ (source_key_value + (word_index + 1) * kGolden));
}

}  // namespace kvcanary
