// Taking a snapshot of page-table rows and comparing the table with it.
#pragma once

#include "snapshot.h"
#include "violations.cuh"

namespace kvcanary {

constexpr int kSnapshotThreads = 256;
constexpr int kCompareThreads = 512;
constexpr int kCompareWarps = kCompareThreads / kWarpSize;

struct SnapshotArguments {
  PageTable table;
  int64_t padding_row;
  IntArray request_rows;
  IntArray prefix_lens;
  int64_t first_request;
  SnapshotTensors snapshot;
};

// y over requests, x over pieces of their entries.
__global__ void __launch_bounds__(kSnapshotThreads)
    snapshot_kernel(const __grid_constant__ SnapshotArguments arguments) {
  const PageTable& table = arguments.table;
  const SnapshotTensors& snapshot = arguments.snapshot;
  for (int64_t request = blockIdx.y; request < arguments.request_rows.size; request += gridDim.y) {
    const int64_t row = arguments.request_rows[request];
    const int64_t prefix_len = arguments.prefix_lens[request];
    const int64_t kept_row = request - arguments.first_request;
    const bool kept = kept_row >= 0 && kept_row < snapshot.entries.rows &&
                      can_be_kept(table, snapshot, row, arguments.padding_row, prefix_len);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      snapshot.rows[request] = kept ? kept_row : kUnknown;
      snapshot.table_rows[request] = row;
      snapshot.prefix_lens[request] = prefix_len;
    }
    if (!kept) continue;
    const EntryRange range = entries_of_prefix(table, prefix_len);
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kSnapshotThreads;
    for (int64_t entry = range.first + static_cast<int64_t>(blockIdx.x) * kSnapshotThreads +
                         threadIdx.x;
         entry < range.end; entry += threads) {
      snapshot.store(kept_row, entry, entry_now(table, row, entry));
    }
  }
}

struct CompareArguments {
  PageTable table;
  const int64_t* request_uids;
  int64_t num_requests;
  SnapshotTensors snapshot;
  int64_t step;
};

// The smallest value of the block, in every thread. Called by every thread.
__device__ __forceinline__ int64_t block_min(int64_t value, int64_t* scratch) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const int64_t other = static_cast<int64_t>(
        __shfl_xor_sync(kFullWarp, static_cast<uint64_t>(value), offset));
    value = other < value ? other : value;
  }
  __syncthreads();
  if (lane_index() == 0) scratch[warp_index()] = value;
  __syncthreads();
  int64_t smallest = scratch[0];
  for (int warp = 1; warp < kCompareWarps; ++warp) {
    smallest = scratch[warp] < smallest ? scratch[warp] : smallest;
  }
  return smallest;
}

// A block a request: its first entry that is another one now gives the row.
__global__ void __launch_bounds__(kCompareThreads)
    compare_tables_kernel(const __grid_constant__ LaunchContext launch,
                          const __grid_constant__ CompareArguments arguments) {
  __shared__ int64_t scratch[kCompareWarps];
  count_launch(launch);
  const PageTable& table = arguments.table;
  const SnapshotTensors& snapshot = arguments.snapshot;
  for (int64_t request = blockIdx.x; request < arguments.num_requests; request += gridDim.x) {
    const int64_t kept_row = snapshot.rows[request], row = snapshot.table_rows[request];
    const int64_t prefix_len = snapshot.prefix_lens[request];
    if (kept_row < 0) continue;
    const EntryRange range = entries_of_prefix(table, prefix_len);
    int64_t changed = range.end;
#pragma unroll 4
    for (int64_t entry = range.first + threadIdx.x; entry < range.end; entry += kCompareThreads) {
      const int64_t now = as_kept(snapshot, entry_now(table, row, entry));
      if (now != snapshot.entries.at(kept_row, entry) && entry < changed) changed = entry;
    }
    changed = block_min(changed, scratch);
    if (changed == range.end || warp_index() != 0) continue;
    const int64_t start = table.window_start(prefix_len);
    int64_t position = changed * positions_per_entry(table);
    position = position < start ? start : position;
    ViolationRow changed_row = row_of_slot(
        launch, slot_by_entry(table, entry_now(table, row, changed), position), kTableChanged,
        arguments.step);
    fill_table_changed(changed_row, arguments.request_uids[request], request, position,
                       slot_by_entry(table, snapshot.entries.at(kept_row, changed), position));
    record_violations(launch, lane_index() == 0, changed_row);
  }
}

}  // namespace kvcanary
