// The write step: one warp walks the chain of one request, 32 entries at a time.
//
// Only the hash chain is serial. Around it the lanes work side by side: they stage the entries of
// a tile in shared memory and fetch the next tile while the chain runs, then store whole records
// and do the checks. All lanes compute the chain; that costs nothing and saves a broadcast.
#pragma once

#include "integers.h"
#include "slots.cuh"
#include "violations.cuh"

namespace kvcanary {

struct WriteArguments {
  const int64_t* write_offsets;  // [capacity + 1]
  const int64_t* seed_slots;     // [capacity]
  const int32_t* num_valid_reqs;
  const int64_t* request_uids;   // [capacity], or null: all unknown
  const int64_t* identity_keys;  // [capacity], or null: all 0
  int64_t capacity;
  IntArray input_ids;
  IntArray positions;
  IntArray out_cache_loc;
  IntArray expected_tokens;     // absent: no input assert
  IntArray expected_positions;  // absent: no input assert
  int64_t step;

  __device__ __forceinline__ int64_t num_requests() const {
    const int64_t valid = *num_valid_reqs;
    return valid < capacity ? valid : capacity;
  }

  // Entries [begin, end) of a request. A broken plan must not lead outside the inputs.
  __device__ __forceinline__ int64_t begin(int64_t request) const {
    const int64_t offset = write_offsets[request];
    return offset < 0 ? 0 : offset > input_ids.size ? input_ids.size : offset;
  }
  __device__ __forceinline__ int64_t end(int64_t request) const { return begin(request + 1); }
};

// ---- the chain ---------------------------------------------------------------------------------

// One entry as its lane holds it; slot below 0: skipped by contract, or beyond the request's end.
struct WriteEntry {
  int64_t slot;
  int64_t token;
  int64_t position;
};

__device__ __forceinline__ WriteEntry load_entry(const WriteArguments& arguments, int64_t index,
                                                 int64_t end) {
  if (index >= end) return WriteEntry{kUnknown, 0, 0};
  return WriteEntry{arguments.out_cache_loc[index], arguments.input_ids[index],
                    arguments.positions[index]};
}

// Up to 32 entries that are not skipped, in order, as the records they become.
struct WriteTile {
  Record records[kWarpSize];
  int64_t slots[kWarpSize];  // where to store each, below 0: nowhere
};

// Where the lane's entry stands in the tile.
struct Staged {
  bool active;  // not skipped
  int rank;     // among the active ones, if active
  int count;    // active ones in the tile
};

__device__ __forceinline__ Staged stage_entry(WriteTile& tile, const WriteEntry& entry) {
  const bool active = entry.slot >= 0;
  const unsigned actives = __ballot_sync(kFullWarp, active);
  const Staged staged = {active, __popc(actives & ((1u << lane_index()) - 1u)), __popc(actives)};
  if (active) tile.records[staged.rank] = Record{entry.token, entry.position, 0, 0};
  __syncwarp();
  return staged;
}

__device__ __forceinline__ uint64_t advance(Record& record, uint64_t prev_hash) {
  const uint64_t token = static_cast<uint64_t>(record.token);
  const uint64_t position = static_cast<uint64_t>(record.position);
  if (lane_index() == 0) record.prev_hash = prev_hash;
  return splitmix64_mix3(prev_hash, token, position);
}

// Fills in the prev_hash of the tile's `count` records; returns the hash behind the last.
__device__ __forceinline__ uint64_t walk_tile(WriteTile& tile, int count, uint64_t prev_hash) {
  if (count == kWarpSize) {
#pragma unroll
    for (int index = 0; index < kWarpSize; ++index) {
      prev_hash = advance(tile.records[index], prev_hash);
    }
  } else {
#pragma unroll 1
    for (int index = 0; index < count; ++index) {
      prev_hash = advance(tile.records[index], prev_hash);
    }
  }
  __syncwarp();
  return prev_hash;
}

// ---- where a chain starts ----------------------------------------------------------------------

struct ChainStart {
  uint64_t hash;
  bool has_seed;
  int64_t seed_position;
};

__device__ __forceinline__ ChainStart start_from_record(const LaunchContext& launch,
                                                        const WriteArguments& arguments,
                                                        int64_t request) {
  const int64_t seed = arguments.seed_slots[request];
  if (!is_in_pool(launch, seed)) {
    const int64_t key =
        arguments.identity_keys == nullptr ? 0 : arguments.identity_keys[request];
    return {chain_start(static_cast<uint64_t>(key)), false, kUnknown};
  }
  const Record record = load_record(launch, seed);
  return {chain_behind(record), true, record.position};
}

// The last entry of the plan that writes `slot`, -1 if none does. Called by the whole warp.
__device__ __forceinline__ int64_t last_entry_that_writes(const WriteArguments& arguments,
                                                          int64_t slot, int64_t begin,
                                                          int64_t end) {
  constexpr int kEntriesPerLane = 8;
  constexpr int64_t kStride = kEntriesPerLane * kWarpSize;
  for (int64_t stop = end; stop > begin; stop -= kStride) {
    int64_t found = -1;
#pragma unroll
    for (int item = 0; item < kEntriesPerLane; ++item) {
      const int64_t entry = stop - kStride + item * kWarpSize + lane_index();
      if (entry >= begin && arguments.out_cache_loc[entry] == slot) found = entry;
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const int64_t other = __shfl_xor_sync(kFullWarp, found, offset);
      found = other > found ? other : found;
    }
    if (found >= 0) return found;
  }
  return -1;
}

// The request that an entry of the plan belongs to.
__device__ __forceinline__ int64_t request_of_entry(const WriteArguments& arguments, int64_t entry,
                                                    int64_t num_requests) {
  int64_t low = 0, high = num_requests;  // offsets[low] <= entry < offsets[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (arguments.begin(middle) <= entry) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A prefix hit within one batch: the seed is a slot that another request of this plan writes, and
// perhaps has not written yet. The warp walks that request's chain itself, up to the seed, and does
// the same for that request's own seed first; so no warp ever waits for another one.
constexpr int kMostLinks = 256;

__device__ __noinline__ ChainStart start_in_flight(const LaunchContext& launch,
                                                   const WriteArguments& arguments,
                                                   int64_t request, int64_t num_requests,
                                                   WriteTile& tile, int64_t* links) {
  const int64_t first_entry = arguments.begin(0);
  const int64_t last_end = arguments.begin(num_requests);
  // From the request back to one whose seed is not in flight; links[i] is the entry that writes
  // the seed of the i-th request on that way.
  int depth = 0;
  int64_t root = request;
  for (;;) {
    const int64_t seed = arguments.seed_slots[root];
    if (seed == kPaddingSlot || !is_in_pool(launch, seed) ||
        !is_in_flight(launch, seed, arguments.step)) {
      break;
    }
    const int64_t entry = last_entry_that_writes(arguments, seed, first_entry, last_end);
    if (entry < 0) break;
    // A circle (impossible in a sane plan), or a way too long to follow: take the stored record.
    if (depth == kMostLinks) return start_from_record(launch, arguments, request);
    if (lane_index() == 0) links[depth] = entry;
    ++depth;
    root = request_of_entry(arguments, entry, num_requests);
  }
  __syncwarp();
  ChainStart start = start_from_record(launch, arguments, root);
  while (depth > 0) {
    --depth;
    const int64_t end = links[depth] + 1;
    for (int64_t base = arguments.begin(root); base < end; base += kWarpSize) {
      const WriteEntry entry = load_entry(arguments, base + lane_index(), end);
      const Staged staged = stage_entry(tile, entry);
      start.hash = walk_tile(tile, staged.count, start.hash);
    }
    start.has_seed = true;
    start.seed_position = arguments.positions[links[depth]];
    root = depth > 0 ? request_of_entry(arguments, links[depth - 1], num_requests) : request;
  }
  return start;
}

// ---- records and checks ------------------------------------------------------------------------

// Stores the tile's records, two lanes a record.
__device__ __forceinline__ void store_tile(const LaunchContext& launch, const WriteTile& tile,
                                           int count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int index = (half * kWarpSize + lane_index()) / 2;
    const int64_t slot = index < count ? tile.slots[index] : kUnknown;
    if (slot < 0) continue;
    const WordPair* from = reinterpret_cast<const WordPair*>(&tile.records[index]);
    WordPair* to = reinterpret_cast<WordPair*>(launch.records + slot * launch.record_stride);
    to[lane_index() % 2] = from[lane_index() % 2];
  }
}

// What a lane has to report about its entry: one row for each bit.
enum WriteReport : unsigned {
  kReportsInput = 1,
  kReportsSequence = 2,
  kReportsOutOfPool = 4,
  kReportsOwner = 8,
};

__device__ __forceinline__ ViolationRow write_row(const LaunchContext& launch,
                                                  const WriteArguments& arguments,
                                                  int64_t request, int64_t request_uid,
                                                  int64_t slot, int64_t fail_reason_bits) {
  ViolationRow row = row_of_slot(launch, slot, fail_reason_bits, arguments.step);
  row.request_uid = request_uid;
  row.batch_row = request;
  return row;
}

// Records the rows of the tile's entries; `reports` are the lane's WriteReport bits.
__device__ __noinline__ void report_write(const LaunchContext& launch,
                                          const WriteArguments& arguments, int64_t request,
                                          int64_t request_uid, int64_t index, uint64_t prev_hash,
                                          int64_t previous_position, unsigned reports) {
  while (__any_sync(kFullWarp, reports != 0)) {
    ViolationRow row;
    if (reports != 0) {
      const unsigned report = reports & (0u - reports);
      const int64_t slot = arguments.out_cache_loc[index];
      row = write_row(launch, arguments, request, request_uid, slot, kWriteOwned);
      row.position = arguments.positions[index];
      row.stored_token = arguments.input_ids[index];
      row.stored_chain_hash = static_cast<int64_t>(prev_hash);
      if (report == kReportsOutOfPool) row.fail_reason_bits = kOutOfPool;
      if (report == kReportsSequence) {
        row.fail_reason_bits = kWritePosition;
        row.expected_token = row.stored_token;
        row.expected_position =
            static_cast<int64_t>(static_cast<uint64_t>(previous_position) + 1);
      } else if (arguments.expected_tokens.present()) {
        row.expected_token = arguments.expected_tokens[index];
        row.expected_position = arguments.expected_positions[index];
        if (report == kReportsInput) {
          row.fail_reason_bits =
              (row.stored_token != row.expected_token ? kWriteToken : 0) |
              (row.position != row.expected_position ? kWritePosition : 0);
        }
      }
      row.expected_aux = row.expected_position;
    }
    record_violations(launch, reports != 0, row);
    reports &= reports - 1;
  }
}

// One block of one warp a request: requests of a prefill then sit on different multiprocessors.
__global__ void __launch_bounds__(kWarpSize)
    write_kernel(const __grid_constant__ LaunchContext launch,
                 const __grid_constant__ WriteArguments arguments) {
  __shared__ WriteTile tile;
  __shared__ int64_t links[kMostLinks];
  count_launch(launch);
  const int64_t request = blockIdx.x;
  const int64_t num_requests = arguments.num_requests();
  if (request >= num_requests) return;
  const int lane = lane_index();
  const int64_t begin = arguments.begin(request);
  const int64_t end = arguments.end(request);
  const int64_t seed = arguments.seed_slots[request];
  const int64_t uid = arguments.request_uids == nullptr ? kUnknown : arguments.request_uids[request];
  const bool asserts_positions =
      *reinterpret_cast<const int32_t*>(launch.chain_position_assert) == 1;
  const bool has_table = has_slot_table(launch);
  if (begin >= end) return;
  WriteEntry next = load_entry(arguments, begin + lane, end);

  const bool waits = seed != kPaddingSlot && is_in_pool(launch, seed) &&
                     is_in_flight(launch, seed, arguments.step);
  const ChainStart start =
      waits ? start_in_flight(launch, arguments, request, num_requests, tile, links)
            : start_from_record(launch, arguments, request);
  if (seed >= launch.num_slots) {
    record_violations(launch, lane == 0,
                      write_row(launch, arguments, request, uid, seed, kOutOfPool));
  }

  uint64_t prev_hash = start.hash;
  int64_t last_position = start.seed_position;  // of the entry before the tile
  uint64_t stored = 0;
#pragma unroll 1
  for (int64_t base = begin; base < end; base += kWarpSize) {
    const WriteEntry entry = next;
    next = load_entry(arguments, base + kWarpSize + lane, end);
    const Staged staged = stage_entry(tile, entry);

    // What the slot table says now is fetched before the chain and used behind it.
    const bool in_pool = staged.active && entry.slot < launch.num_slots;
    const bool claims = has_table && in_pool && entry.slot != kPaddingSlot;
    int64_t owner = kUnknown;
    int32_t state = 0;
    if (claims) {
      owner = static_cast<int64_t>(atomicCAS(
          reinterpret_cast<unsigned long long*>(owner_uid_of(launch, entry.slot)),
          static_cast<unsigned long long>(kUnknown), static_cast<unsigned long long>(uid)));
      state = *state_of(launch, entry.slot);
    }

    prev_hash = walk_tile(tile, staged.count, prev_hash);

    unsigned reports = 0;
    uint64_t running = 0;
    int64_t previous_position = last_position;
    if (staged.active) {
      running = tile.records[staged.rank].prev_hash;
      if (staged.rank > 0) previous_position = tile.records[staged.rank - 1].position;
      if (arguments.expected_tokens.present() &&
          (entry.token != arguments.expected_tokens[base + lane] ||
           entry.position != arguments.expected_positions[base + lane])) {
        reports |= kReportsInput;
      }
      const uint64_t following = static_cast<uint64_t>(previous_position) + 1;
      if (asserts_positions && start.has_seed &&
          static_cast<uint64_t>(entry.position) != following) {
        reports |= kReportsSequence;
      }
      if (!in_pool) reports |= kReportsOutOfPool;
      if (claims && launch.tracks_allocation != 0 && uid != kUnknown && owner != kUnknown &&
          owner != uid) {
        reports |= kReportsOwner;
      }
    }
    if (__any_sync(kFullWarp, reports != 0)) {
      report_write(launch, arguments, request, uid, base + lane, running, previous_position,
                   reports);
    }

    // Of several entries for one slot, the last one's record stays.
    const unsigned same_slot =
        __match_any_sync(kFullWarp, in_pool ? entry.slot : static_cast<int64_t>(-1 - lane));
    const bool is_last = (same_slot >> lane) == 1u;
    if (staged.active) tile.slots[staged.rank] = in_pool && is_last ? entry.slot : kUnknown;
    if (staged.count > 0) last_position = tile.records[staged.count - 1].position;
    __syncwarp();
    store_tile(launch, tile, staged.count);
    if (claims) {
      *writer_uid_of(launch, entry.slot) = uid;
      *writer_step_of(launch, entry.slot) = arguments.step;
      // Under an allocator whose events we see, a free slot stays free, whoever writes to it.
      if (launch.tracks_allocation == 0 || (state & kStateMask) != kFree) {
        *state_of(launch, entry.slot) = (state & ~kStateMask) | kWritten;
      }
    }
    stored += static_cast<uint64_t>(__popc(__ballot_sync(kFullWarp, in_pool)));
    __syncwarp();
  }
  if (lane == 0) count_slots(launch, stored);
}

}  // namespace kvcanary
