// The real-KV fold on the host. One loop, compiled for two instruction sets; the better one that the
// running machine has is picked once.
#pragma once

#include <cstdint>
#include <cstring>

#include "hash.h"
#include "record.h"

namespace kvcanary {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are little-endian");

inline uint64_t load_word(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// The last `tail` (1 .. 7) bytes of a strip, zero-extended. Reads nothing outside the strip.
inline uint64_t load_tail(const uint8_t* bytes, int64_t num_bytes, int64_t tail) {
  if (num_bytes > 8) return load_word(bytes + num_bytes - 8) >> (8 * (8 - tail));
  uint64_t word = 0;
  for (int64_t index = 0; index < tail; ++index) {
    word |= static_cast<uint64_t>(bytes[index]) << (8 * index);
  }
  return word;
}

// Sum of the shares of one strip of `num_bytes` bytes.
__attribute__((always_inline)) inline uint64_t fold_strip(const uint8_t* __restrict bytes,
                                                          int64_t num_bytes, uint64_t key) {
  const int64_t words = num_bytes / 8;
  uint64_t sum = 0;
  for (int64_t index = 0; index < words; ++index) {
    sum += fold_word(load_word(bytes + index * 8), key, static_cast<uint64_t>(index));
  }
  const int64_t tail = num_bytes % 8;
  if (tail != 0) {
    sum += fold_word(load_tail(bytes, num_bytes, tail), key, static_cast<uint64_t>(words));
  }
  return sum;
}

constexpr int64_t kCacheLine = 64;

// Where the bytes of `slot` start in a source.
inline const uint8_t* strip_of(const Source& source, int64_t slot) {
  const uint8_t* rows = reinterpret_cast<const uint8_t*>(source.data);
  if (source.page_size == 1) return rows + slot * source.row_stride;  // spares two divisions
  return rows + slot / source.page_size * source.row_stride +
         slot % source.page_size * source.bytes_per_slot;
}

// fold(slot) of the contract over `num_sources` >= 1 sources. Every strip lies in a page of its own,
// where no hardware prefetcher follows; so each is requested while the one before it is folded.
__attribute__((always_inline)) inline uint64_t fold_sources(const Source* sources,
                                                            int64_t num_sources, int64_t slot) {
  uint64_t sum = 0;
  const uint8_t* bytes = strip_of(sources[0], slot);
  for (int64_t index = 0; index < num_sources; ++index) {
    const uint8_t* next = bytes;
    if (index + 1 < num_sources) {
      next = strip_of(sources[index + 1], slot);
      for (int64_t offset = 0; offset < sources[index + 1].read_bytes; offset += kCacheLine) {
        __builtin_prefetch(next + offset);
      }
    }
    sum += fold_strip(bytes, sources[index].read_bytes, source_key(static_cast<uint64_t>(index)));
    bytes = next;
  }
  return splitmix64(sum);
}

using FoldFunction = uint64_t (*)(const Source*, int64_t, int64_t);

inline uint64_t fold_portable(const Source* sources, int64_t num_sources, int64_t slot) {
  return fold_sources(sources, num_sources, slot);
}

#if defined(__x86_64__)
// 64-bit multiplies in vector registers exist from AVX-512DQ on; AVX2 gains nothing over scalars.
__attribute__((target("avx512f,avx512dq,avx512vl"))) inline uint64_t fold_avx512(
    const Source* sources, int64_t num_sources, int64_t slot) {
  return fold_sources(sources, num_sources, slot);
}

inline FoldFunction best_fold() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return fold_avx512;
  }
  return fold_portable;
}
#else
inline FoldFunction best_fold() { return fold_portable; }
#endif

inline const FoldFunction fold_slot = best_fold();

}  // namespace kvcanary
