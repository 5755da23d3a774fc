// Violation rows and run counters: how a kernel tells the host, without anyone waiting.
//
// The ring usually is pinned host memory that a thread of the host polls. A row is stored as
//   sequence = 0, fence, the other fields, fence, sequence = n + 1        (fences of system scope)
// so a reader that sees the same non-zero sequence before and after it copied the fields holds one
// whole row; any other outcome means "being overwritten, look again".
#pragma once

#include "slots.cuh"

namespace kvcanary {

constexpr int kViolationFields = sizeof(ViolationRow) / sizeof(int64_t);

// Two violations that share a ring row (n and n + capacity) may be stored at the same time by
// different warps. A lock in device memory, one of a few shared by all rows of all rings, keeps
// their fields apart.
constexpr int64_t kRingRowLocks = 1024;
__device__ unsigned int ring_row_locks[kRingRowLocks];

// Whether no younger violation has claimed the ring row of violation n. Once one has, storing n
// would be in vain: this bounds the stores of a launch that reports far more than the ring holds.
__device__ __forceinline__ bool holds_ring_row(const LaunchContext& launch, uint32_t n) {
  const uint32_t recorded =
      *reinterpret_cast<const volatile uint32_t*>(launch.violation_write_index);
  return static_cast<int64_t>(recorded - n) <= launch.ring_capacity;
}

__device__ __forceinline__ void store_violation(const LaunchContext& launch, uint32_t n,
                                                const ViolationRow& row) {
  const int64_t index = static_cast<int64_t>(n) % launch.ring_capacity;
  unsigned int* lock = &ring_row_locks[index % kRingRowLocks];
  while (atomicCAS(lock, 0u, 1u) != 0u) __nanosleep(200);
  __threadfence();
  if (holds_ring_row(launch, n)) {
    volatile int64_t* fields =
        reinterpret_cast<volatile int64_t*>(launch.violation_ring) + index * kViolationFields;
    fields[kViolationFields - 1] = 0;
    __threadfence_system();
    const int64_t* values = reinterpret_cast<const int64_t*>(&row);
#pragma unroll
    for (int field = 0; field < kViolationFields - 1; ++field) fields[field] = values[field];
    __threadfence_system();
    fields[kViolationFields - 1] = static_cast<int64_t>(n) + 1;
  }
  __threadfence_system();
  atomicExch(lock, 0u);
}

// A row about `slot` with everything that is known without looking at a record.
__device__ __forceinline__ ViolationRow row_of_slot(const LaunchContext& launch, int64_t slot,
                                                    int64_t fail_reason_bits, int64_t step) {
  ViolationRow row;
  row.kernel_kind = launch.kernel_kind;
  row.slot = slot;
  row.position = kUnknown;
  row.stored_token = kUnknown;
  row.expected_token = kUnknown;
  row.stored_chain_hash = kUnknown;
  row.expected_aux = kUnknown;
  row.fail_reason_bits = fail_reason_bits;
  row.step = step;
  row.request_uid = kUnknown;
  row.writer_uid = kUnknown;
  row.writer_step = kUnknown;
  row.batch_row = kUnknown;
  row.slot_state = kUnknown;
  row.expected_position = kUnknown;
  row.sequence = 0;
  if (has_slot_table(launch) && is_in_pool(launch, slot)) {
    row.writer_uid = *writer_uid_of(launch, slot);
    row.writer_step = *writer_step_of(launch, slot);
    row.slot_state = *state_of(launch, slot) & kStateMask;
  }
  return row;
}

// Records the row of every lane that has one. Called by the whole warp; one atomic a warp, then
// lane after lane, so that the lanes of a warp never wait for each other's lock.
__device__ __forceinline__ void record_violations(const LaunchContext& launch, bool has_row,
                                                  const ViolationRow& row) {
  const unsigned reporting = __ballot_sync(kFullWarp, has_row);
  if (reporting == 0) return;
  const int lane = lane_index();
  uint32_t first = 0;
  if (lane == 0) {
    first = atomicAdd(reinterpret_cast<unsigned int*>(launch.violation_write_index),
                      static_cast<unsigned int>(__popc(reporting)));
  }
  first = __shfl_sync(kFullWarp, first, 0);
  const uint32_t n = first + static_cast<uint32_t>(__popc(reporting & ((1u << lane) - 1u)));
  for (unsigned left = reporting; left != 0; left &= left - 1) {
    if (lane == __ffs(static_cast<int>(left)) - 1 && holds_ring_row(launch, n)) {
      store_violation(launch, n, row);
    }
    __syncwarp();
  }
}

// The counters of a launch. Every kernel that is the first of a launch calls count_launch once, from
// all threads. It publishes what the launches before this one counted, and counts this one. The last
// thread of the first block does so: in a small launch its warp is the least busy.
__device__ __forceinline__ void count_launch(const LaunchContext& launch) {
  if (blockIdx.x != 0 || blockIdx.y != 0 || threadIdx.x != blockDim.x - 1) return;
  if (launch.counter_mirror != 0) {
    const int64_t slots = load_now(reinterpret_cast<const int64_t*>(launch.slot_run_counter));
    const int64_t launches =
        load_now(reinterpret_cast<const int64_t*>(launch.kernel_run_counter));
    volatile int64_t* mirror = reinterpret_cast<volatile int64_t*>(launch.counter_mirror);
    mirror[0] = slots;
    mirror[1] = launches;
  }
  atomicAdd(reinterpret_cast<unsigned long long*>(launch.kernel_run_counter), 1ull);
}

// Called by one thread of a block or a warp, for all of it.
__device__ __forceinline__ void count_slots(const LaunchContext& launch, uint64_t slots) {
  if (slots == 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(launch.slot_run_counter),
            static_cast<unsigned long long>(slots));
}

}  // namespace kvcanary
