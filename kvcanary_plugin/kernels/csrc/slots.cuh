// Records and slot table, as the kernels read them.
#pragma once

#include "device.cuh"
#include "integers.h"

namespace kvcanary {

// An element of an IntArray as loaded; taking its value waits for the load.
struct RawInteger {
  int32_t low;
  int32_t high;  // of an int32 array: low once more
  bool is_int64;

  __device__ __forceinline__ int64_t value() const {
    const int32_t sign_or_high = is_int64 ? high : low >> 31;
    return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(sign_or_high)) << 32 |
                                static_cast<uint32_t>(low));
  }
};

__device__ __forceinline__ RawInteger load_raw(const IntArray& array, int64_t index) {
  const int32_t* const words = static_cast<const int32_t*>(array.data);
  const int is_int64 = array.is_int64 ? 1 : 0;
  const int32_t* const low = words + (index << is_int64);
  return {load_now(low), load_now(low + is_int64), array.is_int64};
}

// The record at `slot`, which must be inside the pool; two 16-byte loads.
__device__ __forceinline__ Record load_record(const LaunchContext& launch, int64_t slot) {
  const WordPair* address =
      reinterpret_cast<const WordPair*>(launch.records + slot * launch.record_stride);
  const WordPair token_position = load_pair(address);
  const WordPair hashes = load_pair(address + 1);
  return Record{static_cast<int64_t>(token_position.low), static_cast<int64_t>(token_position.high),
                hashes.low, hashes.high};
}

// The running hash behind a record: what its successor stores.
__device__ __forceinline__ uint64_t chain_behind(const Record& record) {
  return splitmix64_mix3(record.prev_hash, static_cast<uint64_t>(record.token),
                         static_cast<uint64_t>(record.position));
}

__device__ __forceinline__ bool is_in_pool(const LaunchContext& launch, int64_t slot) {
  return slot >= 0 && slot < launch.num_slots;
}

__device__ __forceinline__ bool has_slot_table(const LaunchContext& launch) {
  return launch.slot_state != 0;
}

__device__ __forceinline__ int32_t* state_of(const LaunchContext& launch, int64_t slot) {
  return reinterpret_cast<int32_t*>(launch.slot_state) + slot;
}

__device__ __forceinline__ int64_t* owner_uid_of(const LaunchContext& launch, int64_t slot) {
  return reinterpret_cast<int64_t*>(launch.owner_uid) + slot;
}

__device__ __forceinline__ int64_t* writer_step_of(const LaunchContext& launch, int64_t slot) {
  return reinterpret_cast<int64_t*>(launch.writer_step) + slot;
}

__device__ __forceinline__ int64_t* writer_uid_of(const LaunchContext& launch, int64_t slot) {
  return reinterpret_cast<int64_t*>(launch.writer_uid) + slot;
}

// Whether the record's real-KV hash speaks of the bytes that the slot should hold now.
__device__ __forceinline__ bool is_sealed(int32_t state) {
  return (state & kStateMask) == kSealed || (state & kStateMask) == kExternal;
}

// Whether `slot`, inside the pool, is written in this forward.
__device__ __forceinline__ bool is_in_flight(const LaunchContext& launch, int64_t slot,
                                             int64_t step) {
  return has_slot_table(launch) && step != kUnknown && *writer_step_of(launch, slot) == step;
}

}  // namespace kvcanary
