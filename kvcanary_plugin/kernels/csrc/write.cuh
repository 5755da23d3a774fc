// The write step: a chain of hashes per request, and the records along it.
//
// Only the chain is serial. A request of several entries has a block of two warps. The first walks
// the chain and does nothing else; the second stages the next 32 entries in shared memory and, for
// the 32 entries behind the chain, stores whole records and does the checks. A request of one
// entry, which is all of a decode batch, has a lane, and no load of it waits for more than one
// other.
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

  // A broken plan must not lead outside the inputs.
  __device__ __forceinline__ int64_t inside(int64_t offset) const {
    return offset < 0 ? 0 : offset > input_ids.size ? input_ids.size : offset;
  }

  // Entries [begin, end) of a request.
  __device__ __forceinline__ int64_t begin(int64_t request) const {
    return inside(write_offsets[request]);
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

// The entry at `index`, which must be inside the inputs. Nothing in here waits for a load.
struct RawEntry {
  RawInteger slot;
  RawInteger token;
  RawInteger position;

  __device__ __forceinline__ WriteEntry value() const {
    return {slot.value(), token.value(), position.value()};
  }
};

__device__ __forceinline__ RawEntry load_raw_entry(const WriteArguments& arguments,
                                                   int64_t index) {
  return {load_raw(arguments.out_cache_loc, index), load_raw(arguments.input_ids, index),
          load_raw(arguments.positions, index)};
}

__device__ __forceinline__ WriteEntry load_entry(const WriteArguments& arguments, int64_t index,
                                                 int64_t end) {
  if (index >= end) return {kUnknown, 0, 0};
  return load_raw_entry(arguments, index).value();
}

// Up to 32 entries that are not skipped, in order, as the records they become.
struct alignas(WordPair) WriteTile {
  Record records[kWarpSize];
  int64_t slots[kWarpSize];  // where to store each, below 0: nowhere
  int count;
};

// Where the lane's entry stands in the tile.
struct Staged {
  bool active;  // not skipped
  int rank;     // among the active ones, if active
};

__device__ __forceinline__ Staged stage_entry(WriteTile& tile, const WriteEntry& entry) {
  const bool active = entry.slot >= 0;
  const unsigned actives = __ballot_sync(kFullWarp, active);
  const Staged staged = {active, __popc(actives & ((1u << lane_index()) - 1u))};
  if (active) tile.records[staged.rank] = Record{entry.token, entry.position, 0, 0};
  if (lane_index() == 0) tile.count = __popc(actives);
  __syncwarp();
  return staged;
}

constexpr int kChainUnroll = 8;

// Fills in the prev_hash of the tile's records; returns the hash behind the last. Every lane walks:
// that costs nothing and spares a broadcast.
__device__ __forceinline__ uint64_t walk_tile(WriteTile& tile, uint64_t prev_hash) {
  const int count = tile.count;
  const bool stores = lane_index() == 0;
#pragma unroll kChainUnroll
  for (int index = 0; index < count; ++index) {
    Record& record = tile.records[index];
    const uint64_t token = static_cast<uint64_t>(record.token);
    const uint64_t position = static_cast<uint64_t>(record.position);
    if (stores) record.prev_hash = prev_hash;
    prev_hash = splitmix64_mix3(prev_hash, token, position);
  }
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
      stage_entry(tile, entry);
      start.hash = walk_tile(tile, start.hash);
      __syncwarp();
    }
    start.has_seed = true;
    start.seed_position = arguments.positions[links[depth]];
    root = depth > 0 ? request_of_entry(arguments, links[depth - 1], num_requests) : request;
  }
  return start;
}

// ---- records and checks ------------------------------------------------------------------------

__device__ __forceinline__ WordPair* record_address(const LaunchContext& launch, int64_t slot) {
  return reinterpret_cast<WordPair*>(launch.records + slot * launch.record_stride);
}

// Stores the tile's records, two lanes a record.
__device__ __forceinline__ void store_tile(const LaunchContext& launch, const WriteTile& tile) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int index = (half * kWarpSize + lane_index()) / 2;
    const int64_t slot = index < tile.count ? tile.slots[index] : kUnknown;
    if (slot < 0) continue;
    const WordPair* from = reinterpret_cast<const WordPair*>(&tile.records[index]);
    record_address(launch, slot)[lane_index() % 2] = from[lane_index() % 2];
  }
}

// What the slot table said about an entry's slot before this write.
struct Claim {
  bool claims;  // there is a slot table, and the slot is not the padding slot
  int64_t owner;
  int32_t state;
};

__device__ __forceinline__ Claim claim_slot(const LaunchContext& launch, bool in_pool,
                                            int64_t slot, int64_t uid) {
  Claim claim = {has_slot_table(launch) && in_pool && slot != kPaddingSlot, kUnknown, 0};
  if (claim.claims) {
    claim.state = *state_of(launch, slot);
    claim.owner = static_cast<int64_t>(atomicCAS(
        reinterpret_cast<unsigned long long*>(owner_uid_of(launch, slot)),
        static_cast<unsigned long long>(kUnknown), static_cast<unsigned long long>(uid)));
  }
  return claim;
}

__device__ __forceinline__ void store_claim(const LaunchContext& launch, const Claim& claim,
                                            int64_t slot, int64_t uid, int64_t step) {
  if (!claim.claims) return;
  *writer_uid_of(launch, slot) = uid;
  *writer_step_of(launch, slot) = step;
  // Under an allocator whose events we see, a free slot stays free, whoever writes to it.
  if (launch.tracks_allocation == 0 || (claim.state & kStateMask) != kFree) {
    *state_of(launch, slot) = (claim.state & ~kStateMask) | kWritten;
  }
}

// What a lane has to report about its entry: one row for each bit.
enum WriteReport : unsigned {
  kReportsInput = 1,
  kReportsSequence = 2,
  kReportsOutOfPool = 4,
  kReportsOwner = 8,
};

// The reports of an entry that is not skipped. `follows`: the entry continues from
// `previous_position`, and positions are asserted.
__device__ __forceinline__ unsigned write_reports(const LaunchContext& launch,
                                                  const WriteArguments& arguments, int64_t index,
                                                  const WriteEntry& entry, const Claim& claim,
                                                  int64_t uid, bool follows,
                                                  int64_t previous_position) {
  unsigned reports = 0;
  if (arguments.expected_tokens.present() &&
      (entry.token != arguments.expected_tokens[index] ||
       entry.position != arguments.expected_positions[index])) {
    reports |= kReportsInput;
  }
  const uint64_t following = static_cast<uint64_t>(previous_position) + 1;
  if (follows && static_cast<uint64_t>(entry.position) != following) reports |= kReportsSequence;
  if (entry.slot >= launch.num_slots) reports |= kReportsOutOfPool;
  if (claim.claims && launch.tracks_allocation != 0 && uid != kUnknown &&
      claim.owner != kUnknown && claim.owner != uid) {
    reports |= kReportsOwner;
  }
  return reports;
}

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

// ---- requests of one entry ---------------------------------------------------------------------

// A row of the plan.
struct WriteRequest {
  int64_t begin;
  int64_t end;
  int64_t seed;
  int64_t uid;
  int64_t identity_key;
  bool is_valid;  // the plan has this row
  bool asserts_positions;
};

// `request` must be below the plan's capacity. All loads are under way before the first is waited
// for, so a row that the plan does not have is read as well.
__device__ __forceinline__ WriteRequest load_request(const LaunchContext& launch,
                                                     const WriteArguments& arguments,
                                                     int64_t request) {
  const int64_t* const uids = arguments.request_uids;
  const int64_t* const keys = arguments.identity_keys;
  const int64_t* const offset = arguments.write_offsets + request;
  const int32_t valid = load_now(arguments.num_valid_reqs);
  const int64_t begin = load_now(offset);
  const int64_t end = load_now(offset + 1);
  const int64_t seed = load_now(arguments.seed_slots + request);
  const int64_t uid = load_now(uids == nullptr ? offset : uids + request);
  const int64_t key = load_now(keys == nullptr ? offset : keys + request);
  const int32_t asserts =
      load_now(reinterpret_cast<const int32_t*>(launch.chain_position_assert));
  return {arguments.inside(begin),
          arguments.inside(end),
          seed,
          uids == nullptr ? kUnknown : uid,
          keys == nullptr ? 0 : key,
          request < valid,
          asserts == 1};
}

// Whether the seed's record may be one that this plan has yet to write.
__device__ __forceinline__ bool waits_for_seed(const LaunchContext& launch, int64_t seed,
                                               int64_t step) {
  return seed != kPaddingSlot && is_in_pool(launch, seed) && is_in_flight(launch, seed, step);
}

__device__ __forceinline__ void report_seed(const LaunchContext& launch,
                                            const WriteArguments& arguments, int64_t request,
                                            const WriteRequest& row, bool reports) {
  record_violations(launch, reports && row.seed >= launch.num_slots,
                    write_row(launch, arguments, request, row.uid, row.seed, kOutOfPool));
}

// Writes the entry of `request` if it has just one and its seed is not in flight. Called by the
// whole warp, each lane with a request of its own. Returns how many entries the warp stored.
__device__ __forceinline__ unsigned write_single_entry(const LaunchContext& launch,
                                                       const WriteArguments& arguments,
                                                       int64_t request) {
  if (arguments.input_ids.size == 0) return 0;
  // First round of loads: the plan, and the entry where a decode batch has it.
  const bool exists = request < arguments.capacity;
  const int64_t guess = request < arguments.input_ids.size ? request : 0;
  const RawEntry guessed = load_raw_entry(arguments, guess);
  const WriteRequest row = load_request(launch, arguments, exists ? request : 0);
  const bool is_single = exists && row.is_valid && row.end - row.begin == 1;
  WriteEntry entry = guessed.value();
  if (is_single && row.begin != guess) entry = load_entry(arguments, row.begin, row.end);

  // Second round: the seed's record, and what the slot table says.
  const bool active = is_single && entry.slot >= 0;
  const bool in_pool = active && entry.slot < launch.num_slots;
  const bool has_seed = is_single && is_in_pool(launch, row.seed);
  const int64_t seed_slot = has_seed ? row.seed : kPaddingSlot;
  const Record seed = load_record(launch, seed_slot);
  const Claim claim = claim_slot(launch, in_pool, entry.slot, row.uid);
  const int64_t seed_step = load_now(
      has_slot_table(launch) ? writer_step_of(launch, seed_slot) : arguments.write_offsets);

  const bool waits = has_slot_table(launch) && arguments.step != kUnknown && has_seed &&
                     seed_slot != kPaddingSlot && seed_step == arguments.step;
  const bool writes = is_single && !waits;  // what waits is left to a block
  const uint64_t prev_hash =
      has_seed ? chain_behind(seed) : chain_start(static_cast<uint64_t>(row.identity_key));
  unsigned reports = 0;
  if (writes && active) {
    reports = write_reports(launch, arguments, row.begin, entry, claim, row.uid,
                            row.asserts_positions && has_seed, seed.position);
  }
  if (__any_sync(kFullWarp, reports != 0 || (writes && row.seed >= launch.num_slots))) {
    report_seed(launch, arguments, request, row, writes);
    report_write(launch, arguments, request, row.uid, row.begin, prev_hash, seed.position,
                 reports);
  }
  if (writes && in_pool) {
    WordPair* to = record_address(launch, entry.slot);
    to[0] = WordPair{static_cast<uint64_t>(entry.token), static_cast<uint64_t>(entry.position)};
    to[1] = WordPair{prev_hash, 0};
    store_claim(launch, claim, entry.slot, row.uid, arguments.step);
  }
  return static_cast<unsigned>(__popc(__ballot_sync(kFullWarp, writes && in_pool)));
}

// ---- requests of several entries ---------------------------------------------------------------

struct WriteShared {
  WriteTile tiles[2];
  WriteTile scratch;
  int64_t links[kMostLinks];
  ChainStart start;
};

// An entry on its way from staging to its record.
struct EntryInWork {
  WriteEntry entry;
  Staged staged;
  bool in_pool;
  Claim claim;
};

__device__ __forceinline__ EntryInWork stage_tile(const LaunchContext& launch,
                                                  const WriteArguments& arguments,
                                                  WriteTile& tile, int64_t index, int64_t end,
                                                  int64_t uid) {
  EntryInWork work;
  work.entry = load_entry(arguments, index, end);
  work.staged = stage_entry(tile, work.entry);
  work.in_pool = work.staged.active && work.entry.slot < launch.num_slots;
  work.claim = claim_slot(launch, work.in_pool, work.entry.slot, uid);
  return work;
}

// Checks and stores the entries of a tile that the chain has passed. Returns the position of its
// last record, and adds the records stored.
__device__ __forceinline__ int64_t finish_tile(const LaunchContext& launch,
                                               const WriteArguments& arguments, WriteTile& tile,
                                               const EntryInWork& work, int64_t request,
                                               const WriteRequest& row, int64_t index,
                                               bool has_seed, int64_t last_position,
                                               uint64_t& stored) {
  const int lane = lane_index();
  unsigned reports = 0;
  uint64_t running = 0;
  int64_t previous_position = last_position;
  if (work.staged.active) {
    running = tile.records[work.staged.rank].prev_hash;
    if (work.staged.rank > 0) previous_position = tile.records[work.staged.rank - 1].position;
    reports = write_reports(launch, arguments, index, work.entry, work.claim, row.uid,
                            row.asserts_positions && has_seed, previous_position);
  }
  if (__any_sync(kFullWarp, reports != 0)) {
    report_write(launch, arguments, request, row.uid, index, running, previous_position, reports);
  }
  // Of several entries for one slot, the last one's record stays.
  const unsigned same_slot = __match_any_sync(
      kFullWarp, work.in_pool ? work.entry.slot : static_cast<int64_t>(-1 - lane));
  const bool is_last = (same_slot >> lane) == 1u;
  if (work.staged.active) {
    tile.slots[work.staged.rank] = work.in_pool && is_last ? work.entry.slot : kUnknown;
  }
  if (tile.count > 0) last_position = tile.records[tile.count - 1].position;
  __syncwarp();
  store_tile(launch, tile);
  store_claim(launch, work.claim, work.entry.slot, row.uid, arguments.step);
  stored += static_cast<uint64_t>(__popc(__ballot_sync(kFullWarp, work.in_pool)));
  return last_position;
}

// While the first warp walks tile t, the second finishes tile t - 1 and stages tile t + 1.
// Returns how many entries the calling warp stored.
__device__ __forceinline__ uint64_t write_request(const LaunchContext& launch,
                                                  const WriteArguments& arguments,
                                                  WriteShared& shared, int64_t request,
                                                  const WriteRequest& row, bool waits) {
  const int64_t index = row.begin + lane_index();
  const int64_t tiles = divide_up(row.end - row.begin, kWarpSize);
  if (warp_index() == 0) {
    const ChainStart start =
        waits ? start_in_flight(launch, arguments, request, arguments.num_requests(),
                                shared.scratch, shared.links)
              : start_from_record(launch, arguments, request);
    if (lane_index() == 0) shared.start = start;
    report_seed(launch, arguments, request, row, lane_index() == 0);
    uint64_t prev_hash = start.hash;
    __syncthreads();
#pragma unroll 1
    for (int64_t tile = 0; tile < tiles; ++tile) {
      prev_hash = walk_tile(shared.tiles[tile & 1], prev_hash);
      __syncthreads();
    }
    return 0;
  }
  EntryInWork next = stage_tile(launch, arguments, shared.tiles[0], index, row.end, row.uid);
  EntryInWork passed = next;
  uint64_t stored = 0;
  __syncthreads();
  const bool has_seed = shared.start.has_seed;
  int64_t last_position = shared.start.seed_position;
#pragma unroll 1
  for (int64_t tile = 0; tile <= tiles; ++tile) {
    WriteTile& other = shared.tiles[(tile + 1) & 1];
    const EntryInWork walked = next;
    if (tile > 0) {
      last_position = finish_tile(launch, arguments, other, passed, request, row,
                                  index + (tile - 1) * kWarpSize, has_seed, last_position, stored);
      __syncwarp();
    }
    if (tile == tiles) break;
    if (tile + 1 < tiles) {
      next = stage_tile(launch, arguments, other, index + (tile + 1) * kWarpSize, row.end,
                        row.uid);
    }
    passed = walked;
    __syncthreads();
  }
  return stored;
}

// ---- the kernel --------------------------------------------------------------------------------

constexpr int kWriteThreads = 2 * kWarpSize;

__host__ __device__ constexpr int64_t single_entry_blocks(int64_t capacity) {
  return divide_up(capacity, kWriteThreads);
}

// The first blocks write the requests of one entry, kWriteThreads each; the others share the rest.
__global__ void __launch_bounds__(kWriteThreads)
    write_kernel(const __grid_constant__ LaunchContext launch,
                 const __grid_constant__ WriteArguments arguments) {
  __shared__ WriteShared shared;
  count_launch(launch);
  const int64_t for_singles = single_entry_blocks(arguments.capacity);
  uint64_t stored = 0;
  if (blockIdx.x < for_singles) {
    stored = write_single_entry(launch, arguments,
                                static_cast<int64_t>(blockIdx.x) * kWriteThreads + threadIdx.x);
  } else {
#pragma unroll 1
    for (int64_t request = blockIdx.x - for_singles; request < arguments.capacity;
         request += gridDim.x - for_singles) {
      const WriteRequest row = load_request(launch, arguments, request);
      if (!row.is_valid || row.begin >= row.end) continue;
      const bool waits = waits_for_seed(launch, row.seed, arguments.step);
      if (row.end - row.begin == 1 && !waits) continue;
      stored += write_request(launch, arguments, shared, request, row, waits);
      __syncthreads();
    }
  }
  if (lane_index() == 0) count_slots(launch, stored);
}

}  // namespace kvcanary
