// The real-KV fold on the host. One loop, compiled for several instruction sets; the best one that
// the running machine has is picked once.
#pragma once

#include <cstdint>
#include <cstring>

#include "hash.h"
#include "record.h"

namespace kvcanary {

// Sum of the shares of one strip of `num_bytes` bytes.
__attribute__((always_inline)) inline uint64_t fold_strip(const uint8_t* __restrict bytes,
                                                          int64_t num_bytes, uint64_t key) {
  const int64_t words = num_bytes / 8;
  uint64_t sum = 0;
  for (int64_t index = 0; index < words; ++index) {
    uint64_t word;
    std::memcpy(&word, bytes + index * 8, 8);
    sum += fold_word(word, key, static_cast<uint64_t>(index));
  }
  const int64_t tail = num_bytes % 8;
  if (tail != 0) {
    uint64_t word = 0;  // zero-extended
    std::memcpy(&word, bytes + words * 8, static_cast<size_t>(tail));
    sum += fold_word(word, key, static_cast<uint64_t>(words));
  }
  return sum;
}

// fold(slot) of the contract over `num_sources` >= 1 sources.
__attribute__((always_inline)) inline uint64_t fold_sources(const Source* sources,
                                                            int64_t num_sources, int64_t slot) {
  uint64_t sum = 0;
  for (int64_t index = 0; index < num_sources; ++index) {
    const Source& source = sources[index];
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(source.data) +
                           slot / source.page_size * source.row_stride +
                           slot % source.page_size * source.bytes_per_slot;
    sum += fold_strip(bytes, source.read_bytes, source_key(static_cast<uint64_t>(index)));
  }
  return splitmix64(sum);
}

using FoldFunction = uint64_t (*)(const Source*, int64_t, int64_t);

inline uint64_t fold_portable(const Source* sources, int64_t num_sources, int64_t slot) {
  return fold_sources(sources, num_sources, slot);
}

#if defined(__x86_64__)
// 64-bit multiplies in vector registers exist from AVX-512DQ on.
__attribute__((target("avx512f,avx512dq,avx512vl"))) inline uint64_t fold_avx512(
    const Source* sources, int64_t num_sources, int64_t slot) {
  return fold_sources(sources, num_sources, slot);
}

__attribute__((target("avx2"))) inline uint64_t fold_avx2(const Source* sources,
                                                          int64_t num_sources, int64_t slot) {
  return fold_sources(sources, num_sources, slot);
}

inline FoldFunction best_fold() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return fold_avx512;
  }
  return __builtin_cpu_supports("avx2") ? fold_avx2 : fold_portable;
}
#else
inline FoldFunction best_fold() { return fold_portable; }
#endif

inline const FoldFunction fold_slot = best_fold();

}  // namespace kvcanary
