// Launches whose work is one real-KV fold per listed slot: the fold of a write, seal and scrub.
#pragma once

#include "fold.cuh"
#include "integers.h"
#include "slots.cuh"
#include "violations.cuh"

namespace kvcanary {

// Warps of a multiprocessor that fold, in blocks of 8 for lists of any length, and of up to 32 for
// few slots: the more warps share a slot, the fewer waits for memory stand behind one another.
constexpr int kFoldWarpsPerMultiprocessor = 32;
constexpr int kFoldWarpsLog2 = 3;
constexpr int kMostFoldWarpsLog2 = 5;

constexpr int64_t kNotFolded = -1;

// The entries of a write plan, as the launches after it walk them.
struct PlannedSlots {
  const int64_t* write_offsets;  // [capacity + 1]
  const int32_t* num_valid_reqs;
  int64_t capacity;
  IntArray out_cache_loc;

  __device__ __forceinline__ int count() const {
    int64_t requests = *num_valid_reqs;
    requests = requests < 0 ? 0 : requests > capacity ? capacity : requests;
    const int64_t entries = write_offsets[requests];
    return static_cast<int>(entries < out_cache_loc.size ? entries : out_cache_loc.size);
  }
};

__device__ __forceinline__ void store_real_kv_hash(const LaunchContext& launch, int64_t slot,
                                                   uint64_t fold) {
  reinterpret_cast<Record*>(launch.records + slot * launch.record_stride)->real_kv_hash = fold;
}

// Each job: how many entries there are, which slot of one to fold (kNotFolded: leave it out; the
// whole warp asks), and what to do with the fold (called by the whole warp).

// Field 3 of the records that a write in mode PARTIAL or ALL has just stored.
struct WriteFoldJob {
  static constexpr bool kCountsRuns = false;  // the write itself has counted
  PlannedSlots planned;

  __device__ __forceinline__ int count() const { return planned.count(); }

  __device__ __forceinline__ int64_t slot(const LaunchContext& launch, int index) const {
    if (index < planned.write_offsets[0]) return kNotFolded;  // belongs to no request
    const int64_t slot = planned.out_cache_loc[index];
    return is_in_pool(launch, slot) ? slot : kNotFolded;
  }

  __device__ __forceinline__ void finish(const LaunchContext& launch, int64_t slot,
                                         uint64_t fold) const {
    if (lane_index() == 0) store_real_kv_hash(launch, slot, fold);
  }
};

struct SealJob {
  static constexpr bool kCountsRuns = true;
  PlannedSlots planned;

  __device__ __forceinline__ int count() const { return planned.count(); }

  __device__ __forceinline__ int64_t slot(const LaunchContext& launch, int index) const {
    const int64_t slot = planned.out_cache_loc[index];
    return slot > kPaddingSlot && slot < launch.num_slots ? slot : kNotFolded;
  }

  __device__ __forceinline__ void finish(const LaunchContext& launch, int64_t slot,
                                         uint64_t fold) const {
    if (lane_index() != 0) return;
    store_real_kv_hash(launch, slot, fold);
    if (!has_slot_table(launch)) return;
    int32_t* state = state_of(launch, slot);
    const int32_t before = *state;
    if ((before & kStateMask) == kWritten) *state = (before & ~kStateMask) | kSealed;
  }
};

// What the scrub of a list and of a range share.
struct ScrubSlot {
  int64_t step;

  __device__ __forceinline__ int64_t checked(const LaunchContext& launch, int64_t slot) const {
    if (slot <= kPaddingSlot || slot >= launch.num_slots) return kNotFolded;
    if (has_slot_table(launch) && !is_sealed(*state_of(launch, slot))) return kNotFolded;
    return slot;
  }

  __device__ __forceinline__ void compare(const LaunchContext& launch, int64_t slot,
                                          uint64_t fold) const {
    const Record record = load_record(launch, slot);
    if (record.real_kv_hash == fold) return;
    ViolationRow row = row_of_slot(launch, slot, kVerifyRealKvHash, step);
    row.position = record.position;
    row.stored_token = record.token;
    row.stored_chain_hash = static_cast<int64_t>(record.prev_hash);
    record_violations(launch, lane_index() == 0, row);
  }
};

struct ScrubJob {
  static constexpr bool kCountsRuns = true;
  const int64_t* slots;  // [capacity]
  const int32_t* num_valid;
  int64_t capacity;
  ScrubSlot scrub;

  __device__ __forceinline__ int count() const {
    const int64_t valid = *num_valid;
    return static_cast<int>(valid < capacity ? valid : capacity);
  }

  __device__ __forceinline__ int64_t slot(const LaunchContext& launch, int index) const {
    return scrub.checked(launch, slots[index]);
  }

  __device__ __forceinline__ void finish(const LaunchContext& launch, int64_t slot,
                                         uint64_t fold) const {
    scrub.compare(launch, slot, fold);
  }
};

struct ScrubRangeJob {
  static constexpr bool kCountsRuns = true;
  int64_t first_slot;
  int num_slots;  // already inside the pool
  ScrubSlot scrub;

  __device__ __forceinline__ int count() const { return num_slots; }

  __device__ __forceinline__ int64_t slot(const LaunchContext& launch, int index) const {
    return scrub.checked(launch, first_slot + index);
  }

  __device__ __forceinline__ void finish(const LaunchContext& launch, int64_t slot,
                                         uint64_t fold) const {
    scrub.compare(launch, slot, fold);
  }
};

// A fixed number of blocks walks the entries. With few entries several warps share a slot's
// sources, so that even a short list keeps the memory busy; the count is known on the device only.
template <typename Job, int kWarpsLog2>
__global__ void __launch_bounds__(kWarpSize << kWarpsLog2,
                                  kFoldWarpsPerMultiprocessor >> kWarpsLog2)
    fold_kernel(const __grid_constant__ LaunchContext launch, const __grid_constant__ Job job) {
  constexpr int kWarps = 1 << kWarpsLog2;
  __shared__ uint64_t shares[kWarps];
  if (Job::kCountsRuns) count_launch(launch);
  const int count = launch.num_sources > 0 ? job.count() : 0;  // no sources: nothing to fold
  const int warps = static_cast<int>(gridDim.x) * kWarps;
  int parts_log2 = kWarpsLog2;
  while (parts_log2 > 0 &&
         (count > warps >> parts_log2 || 1 << parts_log2 > launch.num_sources)) {
    --parts_log2;
  }
  const int parts = 1 << parts_log2;
  const int slots_per_block = kWarps >> parts_log2;
  const int part = warp_index() & (parts - 1);
  unsigned folded = 0;
#pragma unroll 1
  for (int base = static_cast<int>(blockIdx.x) * slots_per_block; base < count;
       base += static_cast<int>(gridDim.x) * slots_per_block) {
    const int index = base + (warp_index() >> parts_log2);
    const int64_t slot = index < count ? job.slot(launch, index) : kNotFolded;
    uint64_t sum = 0;
    if (slot != kNotFolded) sum = warp_sum(fold_share(launch, slot, part, parts_log2));
    if (parts > 1) {
      __syncthreads();
      if (lane_index() == 0) shares[warp_index()] = sum;
      __syncthreads();
#pragma unroll 1
      for (int other = 1; part == 0 && other < parts; ++other) {
        sum += shares[warp_index() + other];
      }
    }
    if (part == 0 && slot != kNotFolded) {
      job.finish(launch, slot, splitmix64(sum));
      ++folded;
    }
  }
  if (!Job::kCountsRuns) return;
  const uint64_t total = block_sum(lane_index() == 0 ? folded : 0u, shares);
  if (threadIdx.x == 0) count_slots(launch, total);
}

}  // namespace kvcanary
