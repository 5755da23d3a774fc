// Lifecycle events on the GPU: one block applies them in order; within one, entries are independent.
#pragma once

#include "slots.cuh"
#include "violations.cuh"

namespace kvcanary {

// Events that travel as a kernel argument; more than these take further launches.
constexpr int kEventsPerLaunch = 24;

struct EventArguments {
  Event events[kEventsPerLaunch];
  int64_t count;
  int64_t step;
};

__device__ __forceinline__ int64_t event_entry(const Event& event, int64_t address,
                                               int64_t index) {
  return event.element_bytes == 4 ? reinterpret_cast<const int32_t*>(address)[index]
                                  : reinterpret_cast<const int64_t*>(address)[index];
}

__device__ __forceinline__ ViolationRow event_row(const LaunchContext& launch, int64_t slot,
                                                  int64_t reason, int32_t state, int64_t step) {
  ViolationRow row = row_of_slot(launch, slot, reason, step);
  const Record record = load_record(launch, slot);
  row.position = record.position;
  row.stored_token = record.token;
  row.stored_chain_hash = static_cast<int64_t>(record.prev_hash);
  row.slot_state = state & kStateMask;
  return row;
}

// Returns the state word before. Compare-and-swap: an entry that stands twice counts twice.
__device__ __forceinline__ int32_t alloc_state(int32_t* state) {
  int32_t before = *reinterpret_cast<volatile int32_t*>(state);
  while (true) {
    const uint32_t generation =
        (static_cast<uint32_t>(before) & ~static_cast<uint32_t>(kStateMask)) + kGeneration;
    const int32_t seen = atomicCAS(state, before, static_cast<int32_t>(generation | kAllocated));
    if (seen == before) return before;
    before = seen;
  }
}

// Called by the whole block. `entry` is a slot, or a page; -1 where a thread has none.
__device__ __forceinline__ void alloc_or_free(const LaunchContext& launch, const Event& event,
                                              int64_t entry, int64_t step) {
  const bool is_free = event.kind == kEventFree;
  bool all_were_free = is_free && entry >= 0;
#pragma unroll 1
  for (int64_t offset = 0; offset < event.page_size; ++offset) {
    const int64_t slot = entry * event.page_size + offset;
    int32_t before = kFree;
    if (entry >= 0) {
      int32_t* state = state_of(launch, slot);
      before = is_free ? atomicAnd(state, ~kStateMask) : alloc_state(state);
      *owner_uid_of(launch, slot) = kUnknown;
    }
    const bool was_free = (before & kStateMask) == kFree;
    all_were_free = all_were_free && was_free;
    const bool double_alloc = !is_free && entry >= 0 && !was_free;
    ViolationRow row{};
    if (double_alloc) row = event_row(launch, slot, kDoubleAlloc, before, step);
    record_violations(launch, double_alloc, row);
  }
  ViolationRow row{};
  if (all_were_free) {
    row = event_row(launch, entry * event.page_size, kDoubleFree, kFree, step);
  }
  record_violations(launch, all_were_free, row);
}

struct MovedSlot {
  Record record;
  int32_t state_word;
  int64_t owner_uid, writer_uid, writer_step;
};

// Called by the whole block. Reads of one round come before its stores, as in the engine's move.
__device__ __forceinline__ void move_slots(const LaunchContext& launch, const Event& event) {
#pragma unroll 1
  for (int64_t first = 0; first < event.count; first += blockDim.x) {
    const int64_t index = first + threadIdx.x;
    int64_t destination = kUnknown;
    MovedSlot moved{};
    if (index < event.count) {
      const int64_t source = event_entry(event, event.slots, index);
      destination = event_entry(event, event.destinations, index);
      if (source <= kPaddingSlot || !is_in_pool(launch, source) ||
          destination <= kPaddingSlot || !is_in_pool(launch, destination)) {
        destination = kUnknown;
      } else {
        moved = {load_record(launch, source), *state_of(launch, source),
                 *owner_uid_of(launch, source), *writer_uid_of(launch, source),
                 *writer_step_of(launch, source)};
      }
    }
    __syncthreads();
    if (destination >= 0) {
      Record* record =
          reinterpret_cast<Record*>(launch.records + destination * launch.record_stride);
      *record = moved.record;
      *state_of(launch, destination) = moved.state_word;
      *owner_uid_of(launch, destination) = moved.owner_uid;
      *writer_uid_of(launch, destination) = moved.writer_uid;
      *writer_step_of(launch, destination) = moved.writer_step;
    }
    __syncthreads();
  }
}

__device__ __forceinline__ void reset_slots(const LaunchContext& launch) {
  for (int64_t slot = threadIdx.x; slot < launch.num_slots; slot += blockDim.x) {
    *state_of(launch, slot) &= ~kStateMask;
    *owner_uid_of(launch, slot) = kUnknown;
  }
}

// Called by the one block of a launch, by all its threads.
__device__ __forceinline__ void apply_events(const LaunchContext& launch,
                                             const EventArguments& arguments) {
  if (!has_slot_table(launch)) return;
#pragma unroll 1
  for (int64_t number = 0; number < arguments.count; ++number) {
    const Event& event = arguments.events[number];
    if (event.kind == kEventReset) {
      reset_slots(launch);
    } else if (event.kind == kEventMove) {
      move_slots(launch, event);
    } else {
      const int64_t entries_in_pool = launch.num_slots / event.page_size;
      // The whole block walks on together: violations are recorded warp by warp.
#pragma unroll 1
      for (int64_t first = 0; first < event.count; first += blockDim.x) {
        const int64_t index = first + threadIdx.x;
        int64_t entry = index < event.count ? event_entry(event, event.slots, index) : kUnknown;
        if (entry <= kPaddingSlot || entry >= entries_in_pool) entry = kUnknown;
        alloc_or_free(launch, event, entry, arguments.step);
      }
    }
    // The next event sees what this one did.
    __threadfence_block();
    __syncthreads();
  }
}

__global__ void __launch_bounds__(256)
    events_kernel(const __grid_constant__ LaunchContext launch,
                  const __grid_constant__ EventArguments arguments) {
  apply_events(launch, arguments);
}

}  // namespace kvcanary
