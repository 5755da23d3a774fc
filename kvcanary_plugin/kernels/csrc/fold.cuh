// The real-KV fold, a sum over words, so that lanes may take words in any order. Two shapes:
//   fold_share   one warp, or several warps that share the sources, for one slot: seal and scrub.
//                A lane looks after one source's address arithmetic and key for all of the warp.
//   fold_beside  several slots side by side, a few lanes each: verify, which has many slots at hand
//                and often few sources.
// Words are read with 16-byte loads, several of them per lane before the first is used.
#pragma once

#include "device.cuh"

namespace kvcanary {

constexpr int kLoadsInFlight = 4;
constexpr int kVectorBytes = sizeof(WordPair);
constexpr int kWordBytes = sizeof(uint64_t);
// Above this a strip keeps the whole warp busy by itself.
constexpr int kMostBytesSideBySide = 1536;
constexpr int kMostVectorsInRows = 2 * kWarpSize;

// The bytes of one source that belong to one slot.
struct Strip {
  int64_t data;   // address
  int bytes;      // to fold; below 2^31 (the bindings check it)
  uint64_t key;   // source_key
};

// Slots are below 2^31 (the bindings check it), so that 32 bits are enough to divide.
__device__ __forceinline__ Strip strip_of(const LaunchContext& launch, int source_index,
                                          int64_t slot) {
  const Source& source = reinterpret_cast<const Source*>(launch.sources)[source_index];
  const int64_t page_size = source.page_size;
  const int64_t row = page_size > slot ? 0
                                       : static_cast<int64_t>(static_cast<uint32_t>(slot) /
                                                              static_cast<uint32_t>(page_size));
  return Strip{source.data + row * source.row_stride +
                   (slot - row * page_size) * source.bytes_per_slot,
               static_cast<int>(source.read_bytes), source_key(static_cast<uint64_t>(source_index))};
}

// Two words whose first has the key `key`.
__device__ __forceinline__ uint64_t fold_pair(const WordPair& words, uint64_t key) {
  return splitmix64(words.low ^ key) + splitmix64(words.high ^ (key + kGolden));
}

// The share of lane `lane` of kLanes of a run of vectors.
template <int kLanes, int kLoads>
__device__ __forceinline__ uint64_t fold_vectors(int64_t data, uint64_t first_key, int vectors,
                                                 int lane) {
  const WordPair* words_of_lane = reinterpret_cast<const WordPair*>(data) + lane;
  uint64_t key = first_key + 2 * static_cast<uint64_t>(lane) * kGolden;
  uint64_t sum = 0;
#pragma unroll 1
  for (int left = vectors - lane; left > 0; left -= kLoads * kLanes) {
    WordPair words[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (load * kLanes < left) words[load] = load_streaming(words_of_lane + load * kLanes);
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      if (load * kLanes < left) sum += fold_pair(words[load], key + 2 * kLanes * kGolden * load);
    }
    words_of_lane += kLoads * kLanes;
    key += 2 * kLanes * kLoads * kGolden;
  }
  return sum;
}

// Up to 8 bytes as a zero-extended little-endian word. Reads those bytes and no others.
__device__ __forceinline__ uint64_t load_word(const uint8_t* bytes, int count) {
  if (count >= kWordBytes && reinterpret_cast<uintptr_t>(bytes) % sizeof(uint32_t) == 0) {
    const uint32_t* halves = reinterpret_cast<const uint32_t*>(bytes);
    return static_cast<uint64_t>(__ldg(halves)) | static_cast<uint64_t>(__ldg(halves + 1)) << 32;
  }
  const int present = count < kWordBytes ? count : kWordBytes;
  uint64_t word = 0;
#pragma unroll 1
  for (int byte = 0; byte < present; ++byte) {
    word |= static_cast<uint64_t>(__ldg(bytes + byte)) << (8 * byte);
  }
  return word;
}

// The share of lane `lane` of kLanes of one strip of any alignment and length.
// A strip that starts on a word is one word up to a multiple of 16 bytes (or none), vectors, and
// what is left behind them; any other strip is words that are put together from smaller pieces.
template <int kLanes, int kLoads = kLoadsInFlight>
__device__ __forceinline__ uint64_t fold_strip(const Strip& strip, int lane) {
  const bool starts_on_word = strip.data % kWordBytes == 0;
  const int head = starts_on_word ? static_cast<int>(strip.data / kWordBytes % 2) : 0;  // words
  const int vectors = starts_on_word ? (strip.bytes - head * kWordBytes) / kVectorBytes : 0;
  uint64_t sum = fold_vectors<kLanes, kLoads>(strip.data + head * kWordBytes,
                                              strip.key + (head + 1) * kGolden, vectors, lane);
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(strip.data);
#pragma unroll 1
  for (int other = lane;; other += kLanes) {
    const int word = other < head ? other : other + 2 * vectors;
    const int left = strip.bytes - word * kWordBytes;
    if (left <= 0) break;
    sum += fold_word(load_word(bytes + word * kWordBytes, left), strip.key,
                     static_cast<uint64_t>(word));
  }
  return sum;
}

// A lane's share of `count` strips, held by the first lanes of the warp, of 1, 2, 4, ... 64 vectors
// each: every load of the warp takes whole strips side by side, or half of one.
__device__ __forceinline__ uint64_t fold_in_rows(const Strip& mine, int count, int vectors) {
  const int lanes_log2 = vectors > kWarpSize ? 5 : __ffs(vectors) - 1;  // lanes that share a strip
  const int strips_per_load = kWarpSize >> lanes_log2;
  const int rounds = vectors > kWarpSize ? 2 : 1;
  const int loads = rounds * (((count - 1) >> (5 - lanes_log2)) + 1);
  int strip = lane_index() >> lanes_log2;
  int vector = lane_index() & ((1 << lanes_log2) - 1);
  uint64_t sum = 0;
#pragma unroll 1
  for (int first = 0; first < loads; first += kLoadsInFlight) {
    WordPair words[kLoadsInFlight];
    uint64_t keys[kLoadsInFlight];
    bool present[kLoadsInFlight];
#pragma unroll
    for (int load = 0; load < kLoadsInFlight; ++load) {
      const int64_t data = __shfl_sync(kFullWarp, mine.data, strip);
      const uint64_t key = __shfl_sync(kFullWarp, mine.key, strip);
      keys[load] = key + (2 * static_cast<uint64_t>(vector) + 1) * kGolden;
      present[load] = strip < count;
      if (present[load]) {
        words[load] = load_streaming(reinterpret_cast<const WordPair*>(data) + vector);
      }
      // With two rounds the other half of the strip comes before the next strip.
      if (rounds == 1 || vector >= kWarpSize) strip += strips_per_load;
      if (rounds == 2) vector ^= kWarpSize;
    }
#pragma unroll
    for (int load = 0; load < kLoadsInFlight; ++load) {
      if (present[load]) sum += fold_pair(words[load], keys[load]);
    }
  }
  return sum;
}

// The pieces that strips are read in. All strips of a group start on a multiple of the piece, and
// have a multiple of it as their length.
enum class Piece : int {
  kVector,    // 16 bytes
  kWord,      // 8 bytes: vectors, and a word before or behind them
  kHalfWord,  // 4 bytes, two for a word
};

// Which words of a strip one load of a lane brings: up to two, in 32 bits.
struct Portion {
  int code;  // below 0: none

  __device__ __forceinline__ Portion(bool present, int strip, int unit, int head)
      : code(present ? unit << 6 | head << 5 | strip : -1) {}
  __device__ __forceinline__ explicit Portion(int code_) : code(code_) {}

  __device__ __forceinline__ bool present() const { return code >= 0; }
  __device__ __forceinline__ int strip() const { return code & (kWarpSize - 1); }
  __device__ __forceinline__ int unit() const { return code >> 6; }
  __device__ __forceinline__ int head() const { return code >> 5 & 1; }  // words before a vector
};

template <Piece kPiece>
struct PortionWords {
  int first;
  bool has_low;
  bool has_high;

  __device__ __forceinline__ PortionWords(const Portion& portion, int bytes) {
    const bool present = portion.present();
    first = kPiece == Piece::kHalfWord ? portion.unit() : 2 * portion.unit() - portion.head();
    has_low = present;
    has_high = present && kPiece != Piece::kHalfWord;
    if (kPiece == Piece::kWord) {
      has_low = present && first >= 0 && first * kWordBytes < bytes;
      has_high = present && (first + 1) * kWordBytes < bytes;
    }
  }
};

template <Piece kPiece>
__device__ __forceinline__ WordPair load_portion(int64_t data, int bytes,
                                                 const Portion& portion) {
  const PortionWords<kPiece> at(portion, bytes);
  const uint64_t* from = reinterpret_cast<const uint64_t*>(data) + at.first;
  WordPair words = {0, 0};
  if (kPiece == Piece::kHalfWord) {
    const uint32_t* halves = reinterpret_cast<const uint32_t*>(from);
    uint32_t low = 0, high = 0;
    if (at.has_low) low = load_streaming(halves);
    if (at.has_low && (at.first + 1) * kWordBytes <= bytes) high = load_streaming(halves + 1);
    words.low = static_cast<uint64_t>(high) << 32 | low;
  } else if (at.has_low && at.has_high) {
    words = load_streaming(reinterpret_cast<const WordPair*>(from));
  } else if (at.has_low) {
    words.low = load_streaming(from);
  } else if (at.has_high) {
    words.high = load_streaming(from + 1);
  }
  return words;
}

// A lane's share of `count` strips of `bytes` each, held by the first lanes of the warp. The lanes
// take the portions of all strips one after the other, so that none idles whatever the size is.
template <Piece kPiece>
__device__ __forceinline__ uint64_t fold_side_by_side(const Strip& mine, int count, int bytes) {
  const int words = (bytes + kWordBytes - 1) / kWordBytes;
  const int units = kPiece == Piece::kVector ? words / 2
                    : kPiece == Piece::kWord ? words / 2 + 1
                                             : words;
  const int strips_on = kWarpSize / units, units_on = kWarpSize % units;
  int strip = lane_index() / units;
  int unit = lane_index() % units;
  uint64_t sum = 0;
#pragma unroll 1
  for (int left = count * units; left > 0; left -= kLoadsInFlight * kWarpSize) {
    WordPair loaded[kLoadsInFlight];
    int codes[kLoadsInFlight];
#pragma unroll
    for (int load = 0; load < kLoadsInFlight; ++load) {
      const int64_t data = __shfl_sync(kFullWarp, mine.data, strip & (kWarpSize - 1));
      // A vector starts on 16 bytes: with a word before it, words 1 and 2 are the first one.
      const int head = kPiece == Piece::kWord ? static_cast<int>(data / kWordBytes) & 1 : 0;
      const Portion portion(strip < count, strip, unit, head);
      loaded[load] = load_portion<kPiece>(data, bytes, portion);
      codes[load] = portion.code;
      strip += strips_on;
      unit += units_on;
      if (unit >= units) {
        unit -= units;
        ++strip;
      }
    }
#pragma unroll
    for (int load = 0; load < kLoadsInFlight; ++load) {
      const Portion portion(codes[load]);
      const PortionWords<kPiece> at(portion, bytes);
      const uint64_t key = __shfl_sync(kFullWarp, mine.key, portion.strip()) +
                           static_cast<uint64_t>(at.first + 1) * kGolden;
      if (at.has_low) sum += splitmix64(loaded[load].low ^ key);
      if (at.has_high) sum += splitmix64(loaded[load].high ^ (key + kGolden));
    }
  }
  return sum;
}

// A lane's share of the sources part, part + parts, ... of `slot`, with parts = 1 << parts_log2.
// Called by the whole warp with the same arguments; the shares of all lanes and all parts add up
// to the sum inside the fold.
__device__ __forceinline__ uint64_t fold_share(const LaunchContext& launch, int64_t slot, int part,
                                               int parts_log2) {
  const int num_sources = static_cast<int>(launch.num_sources);
  uint64_t sum = 0;
#pragma unroll 1
  for (int base = part; base < num_sources; base += kWarpSize << parts_log2) {
    const int left = ((num_sources - base - 1) >> parts_log2) + 1;
    const int count = left < kWarpSize ? left : kWarpSize;
    // Lanes beyond the last source repeat it: the votes below then speak of all sources.
    const int source = base + ((lane_index() < count ? lane_index() : count - 1) << parts_log2);
    const Strip mine = strip_of(launch, source, slot);
    const int bytes = __shfl_sync(kFullWarp, mine.bytes, 0);
    const int edges = static_cast<int>(mine.data) | bytes;
    const bool same = mine.bytes == bytes && bytes <= kMostBytesSideBySide;
    const int vectors = bytes / kVectorBytes;
    const bool even = vectors <= kMostVectorsInRows && __popc(vectors) == 1;
    if (__all_sync(kFullWarp, same && even && edges % kVectorBytes == 0)) {
      sum += fold_in_rows(mine, count, vectors);
    } else if (__all_sync(kFullWarp, same && edges % kVectorBytes == 0)) {
      sum += fold_side_by_side<Piece::kVector>(mine, count, bytes);
    } else if (__all_sync(kFullWarp, same && edges % kWordBytes == 0)) {
      sum += fold_side_by_side<Piece::kWord>(mine, count, bytes);
    } else if (__all_sync(kFullWarp, same && edges % (kWordBytes / 2) == 0)) {
      sum += fold_side_by_side<Piece::kHalfWord>(mine, count, bytes);
    } else {
#pragma unroll 1
      for (int index = 0; index < count; ++index) {
        sum += fold_strip<kWarpSize>(Strip{__shfl_sync(kFullWarp, mine.data, index),
                                           __shfl_sync(kFullWarp, mine.bytes, index),
                                           __shfl_sync(kFullWarp, mine.key, index)},
                                     lane_index());
      }
    }
  }
  return sum;
}

// Loads of a lane in flight. More of them pay for fewer warps at a time.
constexpr int kLoadsBeside = 8;

// The folds of up to kWarpSize / kLanes slots, one per group of kLanes lanes, in all lanes of the
// group. Groups without a slot (below 0) idle. Called by the whole warp.
template <int kLanes>
__device__ __forceinline__ uint64_t fold_beside(const LaunchContext& launch, int64_t slot) {
  uint64_t sum = 0;
  const int num_sources = slot < 0 ? 0 : static_cast<int>(launch.num_sources);
#pragma unroll 1
  for (int source = 0; source < num_sources; ++source) {
    sum += fold_strip<kLanes, kLoadsBeside>(strip_of(launch, source, slot), lane_index() % kLanes);
  }
  __syncwarp();
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, offset);
  }
  return splitmix64(sum);
}

}  // namespace kvcanary
