// Filling plans from the page table, marking the slots of a forward, translating slots.
#pragma once

#include "events.cuh"
#include "slots.cuh"
#include "table.h"
#include "violations.cuh"

namespace kvcanary {

constexpr int kPlanThreads = 256;
constexpr int kPlanWarps = kPlanThreads / kWarpSize;

struct Batch {
  IntArray request_rows;
  IntArray prefix_lens;
  IntArray extend_lens;
  int64_t padding_row;

  __device__ __forceinline__ int64_t size() const { return request_rows.size; }

  __device__ __forceinline__ int64_t extend_len(int64_t index) const {
    const int64_t length = extend_lens[index];
    return length > 0 ? length : 0;
  }

  // Whether the request reads anything.
  __device__ __forceinline__ bool reads(int64_t index) const {
    return request_rows[index] != padding_row && prefix_lens[index] > 0;
  }
};

struct WritePlanOut {
  int64_t* offsets;    // [capacity + 1]
  int64_t* seeds;      // [capacity]
  int32_t* num_valid;  // [1]
};

struct VerifyPlanOut {
  int64_t* slots;
  int64_t* expected_tokens;
  int64_t* expected_positions;
  int64_t* prev_slots;
  int32_t* num_valid;
  int32_t* enable;
  int64_t capacity;
};

// The sum of value(index) over [0, end), in every lane. Called by the whole warp.
template <typename Value>
__device__ __forceinline__ int64_t warp_sum_below(int64_t end, Value value) {
  int64_t sum = 0;
  for (int64_t index = lane_index(); index < end; index += kWarpSize) sum += value(index);
  return static_cast<int64_t>(warp_sum(static_cast<uint64_t>(sum)));
}

// Request `index`'s row of the write plan, by one warp. What lies behind the batch stays untouched.
__device__ __forceinline__ void fill_write_row(const WritePlanOut& plan, const PageTable& table,
                                               const Batch& batch, int64_t index) {
  const int64_t begin =
      warp_sum_below(index, [&](int64_t other) { return batch.extend_len(other); });
  if (lane_index() != 0) return;
  const int64_t row = batch.request_rows[index];
  plan.offsets[index + 1] = begin + batch.extend_len(index);
  plan.seeds[index] =
      row == batch.padding_row ? kUnknown : table.seed(row, batch.prefix_lens[index]);
}

__device__ __forceinline__ void fill_write_header(const WritePlanOut& plan, const Batch& batch) {
  plan.offsets[0] = 0;
  *plan.num_valid = static_cast<int32_t>(batch.size());
}

// ---- both plans --------------------------------------------------------------------------------

struct PlanArguments {
  VerifyPlanOut verify_plan;
  WritePlanOut write_plan;
  PageTable table;
  Batch batch;
  TokenHistory history;
  int64_t token_offset;
};

__device__ __forceinline__ int64_t verify_entries(const PlanArguments& arguments, int64_t index) {
  if (!arguments.batch.reads(index)) return 0;
  const int64_t prefix_len = arguments.batch.prefix_lens[index];
  return prefix_len - arguments.table.window_start(prefix_len);
}

// Grid: y over requests, x over the positions of one; both walk on in strides. Every warp adds up
// the requests before its own: a few loads from L2 instead of a second launch.
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ PlanArguments arguments) {
  const Batch& batch = arguments.batch;
  const VerifyPlanOut& plan = arguments.verify_plan;
  const auto entries = [&](int64_t index) { return verify_entries(arguments, index); };
  const int64_t total = warp_sum_below(batch.size(), entries);
  const bool fits = total <= plan.capacity;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    *plan.enable = fits ? 1 : 0;
    *plan.num_valid = fits ? static_cast<int32_t>(total) : 0;
    fill_write_header(arguments.write_plan, batch);
  }
#pragma unroll 1
  for (int64_t index = blockIdx.y; index < batch.size(); index += gridDim.y) {
    if (blockIdx.x == 0 && warp_index() == 0) {
      fill_write_row(arguments.write_plan, arguments.table, batch, index);
    }
    if (!fits || !batch.reads(index)) continue;
    const int64_t row = batch.request_rows[index];
    const int64_t prefix_len = batch.prefix_lens[index];
    const int64_t start = arguments.table.window_start(prefix_len);
    const int64_t first_entry = warp_sum_below(index, entries);
#pragma unroll 1
    for (int64_t position = start + static_cast<int64_t>(blockIdx.x) * kPlanThreads + threadIdx.x;
         position < prefix_len; position += static_cast<int64_t>(gridDim.x) * kPlanThreads) {
      const int64_t entry = first_entry + position - start;
      plan.slots[entry] =
          arguments.table.mapped(arguments.table.raw_slot(row, position), kPaddingSlot);
      plan.expected_tokens[entry] =
          arguments.history.at(index, row, position + arguments.token_offset);
      plan.expected_positions[entry] = position;
      plan.prev_slots[entry] = arguments.table.predecessor(row, position, start);
    }
  }
}

// ---- the write plan alone, and the marks of a forward ------------------------------------------

struct PrepareArguments {
  WritePlanOut write_plan;
  int64_t* uids_out;  // [capacity], or null
  int64_t* keys_out;  // [capacity], or null
  PageTable table;
  Batch batch;
  const int64_t* request_uids;
  const int64_t* identity_keys;  // or null: all 0
  IntArray out_cache_loc;
  int64_t step;
  EventArguments happened;  // with any in it the launch has a block more
};

// What one thread asks for about its request before it waits for anything.
struct PreparedRequest {
  RawInteger row;
  RawInteger prefix_len;
  RawInteger extend_len;
  int64_t uid;
  int64_t identity_key;
};

__device__ __forceinline__ PreparedRequest load_prepared(const PrepareArguments& arguments,
                                                         int64_t index) {
  const Batch& batch = arguments.batch;
  const int64_t* const keys = arguments.identity_keys;
  PreparedRequest request = {load_raw(batch.request_rows, index),
                             load_raw(batch.prefix_lens, index),
                             load_raw(batch.extend_lens, index),
                             load_now(arguments.request_uids + index), 0};
  if (keys != nullptr) request.identity_key = load_now(keys + index);
  return request;
}

// The sum of the values of this thread and the ones before it in the block. `scratch` holds one
// value a warp. Called by every thread.
__device__ __forceinline__ int64_t block_running_sum(int64_t value, int64_t* scratch) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int64_t before = __shfl_up_sync(kFullWarp, value, distance);
    if (lane_index() >= distance) value += before;
  }
  __syncthreads();
  if (lane_index() == kWarpSize - 1) scratch[warp_index()] = value;
  __syncthreads();
  for (int warp = 0; warp < warp_index(); ++warp) value += scratch[warp];
  return value;
}

// Fills the plan's rows of the requests `first`, ... of one block, a thread each.
__device__ __forceinline__ void prepare_requests(const PrepareArguments& arguments, int64_t first,
                                                 int64_t* scratch) {
  const Batch& batch = arguments.batch;
  const WritePlanOut& plan = arguments.write_plan;
  const int64_t index = first + threadIdx.x;
  const bool present = index < batch.size();
  PreparedRequest request = {};
  if (present) request = load_prepared(arguments, index);
  int64_t below = 0;
  for (int64_t other = threadIdx.x; other < first; other += kPlanThreads) {
    below += batch.extend_len(other);
  }
  if (first > 0) {
    below = static_cast<int64_t>(
        block_sum(static_cast<uint64_t>(below), reinterpret_cast<uint64_t*>(scratch)));
  }
  const int64_t extend_len = request.extend_len.value();
  const int64_t end = below + block_running_sum(extend_len > 0 ? extend_len : 0, scratch);
  if (!present) return;
  if (index == 0) fill_write_header(plan, batch);
  const int64_t row = request.row.value();
  const int64_t prefix_len = request.prefix_len.value();
  plan.offsets[index + 1] = end;
  plan.seeds[index] = row == batch.padding_row ? kUnknown : arguments.table.seed(row, prefix_len);
  if (arguments.uids_out != nullptr) arguments.uids_out[index] = request.uid;
  if (arguments.keys_out != nullptr) arguments.keys_out[index] = request.identity_key;
}

// Marks the slots that this forward writes, entries `first`, ... in steps of `stride`.
__device__ __forceinline__ void mark_slots(const LaunchContext& launch,
                                           const PrepareArguments& arguments, int64_t first,
                                           int64_t stride, int64_t* scratch) {
  const Batch& batch = arguments.batch;
  const IntArray& slots = arguments.out_cache_loc;
  int64_t tokens = 0;
#pragma unroll 4
  for (int64_t index = threadIdx.x; index < batch.size(); index += kPlanThreads) {
    tokens += batch.extend_len(index);
  }
  tokens = static_cast<int64_t>(
      block_sum(static_cast<uint64_t>(tokens), reinterpret_cast<uint64_t*>(scratch)));
  const int64_t marked = tokens < slots.size ? tokens : slots.size;
#pragma unroll 4
  for (int64_t entry = first + threadIdx.x; entry < marked; entry += stride) {
    const int64_t slot = slots[entry];
    if (slot > kPaddingSlot && slot < launch.num_slots) {
      *writer_step_of(launch, slot) = arguments.step;
    }
  }
}

// With events the first block applies them, then marks all slots, and leaves the plan to the
// others: a row about an event still tells who wrote the slot last.
__global__ void __launch_bounds__(kPlanThreads)
    prepare_kernel(const __grid_constant__ LaunchContext launch,
                   const __grid_constant__ PrepareArguments arguments) {
  __shared__ int64_t scratch[kPlanWarps];
  count_launch(launch);
  const bool has_events = arguments.happened.count > 0;
  const int64_t block = static_cast<int64_t>(blockIdx.x) - (has_events ? 1 : 0);
  const int64_t stride = (static_cast<int64_t>(gridDim.x) - (has_events ? 1 : 0)) * kPlanThreads;
  if (block < 0) {
    apply_events(launch, arguments.happened);
    if (has_slot_table(launch)) mark_slots(launch, arguments, 0, kPlanThreads, scratch);
    return;
  }
  if (block == 0 && threadIdx.x == 0 && arguments.batch.size() == 0) {
    fill_write_header(arguments.write_plan, arguments.batch);
  }
#pragma unroll 1
  for (int64_t first = block * kPlanThreads; first < arguments.batch.size(); first += stride) {
    prepare_requests(arguments, first, scratch);
  }
  if (!has_events && has_slot_table(launch)) {
    mark_slots(launch, arguments, block * kPlanThreads, stride, scratch);
  }
}

// ---- translation -------------------------------------------------------------------------------

struct TranslateArguments {
  IntArray slots;
  IntArray lookup;
  void* output;
  bool output_is_int64;
};

__global__ void __launch_bounds__(kPlanThreads)
    translate_kernel(const __grid_constant__ TranslateArguments arguments) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kPlanThreads + threadIdx.x;
  if (index >= arguments.slots.size) return;
  const int64_t slot = arguments.slots[index];
  int64_t value = slot >= 0 && slot < arguments.lookup.size ? arguments.lookup[slot] : kUnknown;
  if (value <= kPaddingSlot) value = kUnknown;
  if (arguments.output_is_int64) {
    static_cast<int64_t*>(arguments.output)[index] = value;
  } else {
    static_cast<int32_t*>(arguments.output)[index] = static_cast<int32_t>(value);
  }
}

}  // namespace kvcanary
