// The verify step, straight from the page table or over a materialised plan: one lane an entry.
//
// An entry's predecessor is, nearly always, the entry of the neighbouring lane: every lane computes
// the hash behind its own record and hands it on through a shuffle. What is wrong is rare, so the
// fast path only finds out that an entry is bad; reporting looks at the entry once more from
// scratch, out of the way of the fast path's registers.
#pragma once

#include "fold.cuh"
#include "integers.h"
#include "slots.cuh"
#include "table.h"
#include "violations.cuh"

namespace kvcanary {

constexpr int kVerifyThreads = 128;
constexpr int kVerifyWarps = kVerifyThreads / kWarpSize;
// Positions of a lane that are in flight at once in a launch without real-KV folds.
constexpr int kVerifyItems = 4;
// Blocks of a multiprocessor in a launch with them: what counts there are bytes on their way.
constexpr int kFoldingBlocks = 6;

// One slot to verify and what the request says about it.
struct VerifyEntry {
  int64_t slot;
  bool readable;  // false: the slot is itself the error to report
  int64_t expected_position;
  int64_t expected_token;
  int64_t identity_key;
  int64_t request_uid;
  int64_t batch_row;
  bool has_prefix_hash;  // the host knows the hash behind this entry
  uint64_t prefix_hash;
};

enum class Link : int { kUnknown, kKnown, kOutOfPool };

// What stands before an entry in its chain.
struct Predecessor {
  Link link;
  uint64_t chain;  // hash behind it; only if known
};

// Whether the entry's record may be looked at.
__device__ __forceinline__ bool is_reachable(const LaunchContext& launch,
                                             const VerifyEntry& entry) {
  return entry.readable && entry.slot != kPaddingSlot && is_in_pool(launch, entry.slot);
}

__device__ __forceinline__ Predecessor load_predecessor(const LaunchContext& launch,
                                                        int64_t prev_slot, int64_t identity_key,
                                                        int64_t step) {
  if (prev_slot == kChainHead) {
    return {Link::kKnown, chain_start(static_cast<uint64_t>(identity_key))};
  }
  if (!is_in_pool(launch, prev_slot)) return {Link::kOutOfPool, 0};
  if (prev_slot == kPaddingSlot || is_in_flight(launch, prev_slot, step)) {
    return {Link::kUnknown, 0};
  }
  return {Link::kKnown, chain_behind(load_record(launch, prev_slot))};
}

// FailReason bits of a reachable entry, its real-KV hash apart. `state` is -1 without a slot table.
__device__ __forceinline__ int64_t judge(const VerifyEntry& entry, const Record& stored,
                                         int32_t state, uint64_t chain_behind_stored,
                                         const Predecessor& predecessor) {
  // Nobody wrote the slot: what else differs says nothing.
  if (state == kAllocated) return kUnwrittenRead;
  int64_t bits = 0;
  if (predecessor.link == Link::kOutOfPool) bits |= kOutOfPool;
  if (predecessor.link == Link::kKnown && stored.prev_hash != predecessor.chain) {
    bits |= kVerifyChainHash;
  }
  if (entry.expected_token != kUnknown && stored.token != entry.expected_token) {
    bits |= kVerifyToken;
  }
  if (stored.position != entry.expected_position) bits |= kVerifyPosition;
  if (entry.has_prefix_hash && chain_behind_stored != entry.prefix_hash) bits |= kPrefixIdentity;
  if (state == kFree) bits |= kFreedRead;
  return bits;
}

__device__ __forceinline__ int32_t load_state(const LaunchContext& launch, int64_t slot) {
  return has_slot_table(launch) ? *state_of(launch, slot) & kStateMask
                                : static_cast<int32_t>(kUnknown);
}

__device__ __forceinline__ bool holds_sealed_bytes(int32_t state) {
  return state == kUnknown || is_sealed(state);
}

// Looks at the entry of every lane that has a bad one and records its row. Called by the whole
// warp.
__device__ __forceinline__ void report_entries(const LaunchContext& launch, bool is_bad,
                                               const VerifyEntry& entry, int64_t prev_slot,
                                               bool real_kv_differs, int64_t step) {
  ViolationRow row;
  if (is_bad) {
    row = row_of_slot(launch, entry.slot, kOutOfPool, step);
    row.expected_token = entry.expected_token;
    row.request_uid = entry.request_uid;
    row.batch_row = entry.batch_row;
    row.expected_position = entry.expected_position;
    if (is_reachable(launch, entry)) {
      const Record stored = load_record(launch, entry.slot);
      const Predecessor predecessor =
          load_predecessor(launch, prev_slot, entry.identity_key, step);
      const uint64_t expected_chain =
          predecessor.link == Link::kKnown ? predecessor.chain : stored.prev_hash;
      row.position = stored.position;
      row.stored_token = stored.token;
      row.stored_chain_hash = static_cast<int64_t>(stored.prev_hash);
      row.expected_aux = static_cast<int64_t>(expected_chain);
      row.fail_reason_bits = judge(entry, stored, static_cast<int32_t>(row.slot_state),
                                   chain_behind(stored), predecessor) |
                             (real_kv_differs ? kVerifyRealKvHash : 0);
    }
  }
  record_violations(launch, is_bad, row);
}

// For every lane that asks: whether the bytes of its slot differ from its record's fold. Serves
// the lanes that ask in turn, kWarpSize / kLanes at once. Called by the whole warp.
template <int kLanes>
__device__ __forceinline__ bool folds_differ(const LaunchContext& launch, bool asks, int64_t slot,
                                             uint64_t stored_fold) {
  constexpr int kSlots = kWarpSize / kLanes;
  const int lane = lane_index();
  bool differs = false;
#pragma unroll 1
  for (unsigned left = __ballot_sync(kFullWarp, asks); left != 0;) {
    unsigned later = left;  // what is left after the groups before this one have taken a lane each
    for (int group = 0; group < lane / kLanes; ++group) later &= later - 1;
    const int served = __ffs(static_cast<int>(later)) - 1;
    const int64_t served_slot = __shfl_sync(kFullWarp, slot, served & (kWarpSize - 1));
    const uint64_t fold = fold_beside<kLanes>(launch, served < 0 ? -1 : served_slot);
    const int turn = __popc(left & ((1u << lane) - 1u));
    const uint64_t my_fold = __shfl_sync(kFullWarp, fold, (turn & (kSlots - 1)) * kLanes);
    if ((left >> lane & 1u) != 0 && turn < kSlots) differs = my_fold != stored_fold;
    for (int group = 0; group < kSlots; ++group) left &= left - 1;
  }
  return differs;
}

// Strips above this many bytes are better read by eight lanes than by four.
constexpr int kMostBytesForFewLanes = 1536;

__device__ __forceinline__ bool real_kv_differs(const LaunchContext& launch, bool asks,
                                                int64_t slot, uint64_t stored_fold) {
  const Source& first = *reinterpret_cast<const Source*>(launch.sources);
  return first.read_bytes > kMostBytesForFewLanes
             ? folds_differ<8>(launch, asks, slot, stored_fold)
             : folds_differ<4>(launch, asks, slot, stored_fold);
}

// ---- straight from the page table --------------------------------------------------------------

struct TableVerifyArguments {
  PageTable table;  // a row has fewer than 2^31 positions (the bindings check it)
  int64_t padding_row;
  IntArray request_rows;
  const int64_t* request_uids;
  IntArray prefix_lens;
  const int64_t* identity_keys;  // or null: all 0
  TokenHistory history;
  int64_t token_offset;
  const int64_t* prefix_hashes;  // or null
  const int32_t* prefix_hash_valid;
  int64_t step;
};

__device__ __noinline__ void report_table_entries(const LaunchContext& launch,
                                                  const TableVerifyArguments& arguments,
                                                  int64_t index, int64_t position, bool is_bad,
                                                  bool real_kv_differs) {
  VerifyEntry entry = {};
  int64_t prev_slot = kPaddingSlot;
  if (is_bad) {
    const int64_t row = arguments.request_rows[index];
    const int64_t prefix_len = arguments.prefix_lens[index];
    entry.expected_position = position;
    entry.expected_token = arguments.history.at(index, row, position + arguments.token_offset);
    entry.request_uid = arguments.request_uids[index];
    entry.batch_row = index;
    if (arguments.identity_keys != nullptr) entry.identity_key = arguments.identity_keys[index];
    if (arguments.prefix_hashes != nullptr && position == prefix_len - 1) {
      entry.has_prefix_hash = arguments.prefix_hash_valid[index] != 0;
      entry.prefix_hash = static_cast<uint64_t>(arguments.prefix_hashes[index]);
    }
    entry.slot = kUnknown;
    if (arguments.table.has_row(row)) {
      const LiveSlot live = arguments.table.live_slot(row, position);
      entry.slot = live.slot;
      entry.readable = live.readable;
      prev_slot = arguments.table.predecessor(row, position,
                                              arguments.table.window_start(prefix_len));
    }
  }
  report_entries(launch, is_bad, entry, prev_slot, real_kv_differs, arguments.step);
}

// The positions [start, end) that one request reads: those before `width` stand in the table, and
// one entry at `width` stands for everything beyond it.
struct RequestReads {
  int64_t index;
  int64_t row;
  int start;
  int end;
  int width;
  int prefix_end;  // position of the last prefix token if the host knows the hash behind it, or -1
  uint64_t prefix_hash;
  uint64_t head_chain;  // hash before position 0
};

// kItems values of a 1-D or one row of a 2-D integer tensor. No load waits for another one.
template <int kItems>
__device__ __forceinline__ void gather(const void* data, bool is_int64, int64_t offset,
                                       const uint32_t (&column)[kItems],
                                       int64_t (&value)[kItems]) {
  if (is_int64) {
    const int64_t* from = static_cast<const int64_t*>(data) + offset;
#pragma unroll
    for (int item = 0; item < kItems; ++item) value[item] = from[column[item]];
  } else {
    const int32_t* from = static_cast<const int32_t*>(data) + offset;
#pragma unroll
    for (int item = 0; item < kItems; ++item) value[item] = from[column[item]];
  }
}

// The slots at `position` of each item. Items that are not `present` read the table's first column.
template <int kItems>
__device__ __forceinline__ void gather_slots(const PageTable& table, const RequestReads& reads,
                                             const int (&position)[kItems],
                                             const bool (&present)[kItems],
                                             int64_t (&slot)[kItems], bool (&readable)[kItems]) {
  const uint32_t page_size = static_cast<uint32_t>(table.page_size);
  uint32_t column[kItems];
  uint32_t in_page[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const bool inside = present[item] && position[item] < reads.width;
    column[item] = inside ? static_cast<uint32_t>(position[item]) : 0;
    in_page[item] = 0;
    readable[item] = inside;
  }
  if (page_size != 1) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const uint32_t page = column[item] / page_size;
      in_page[item] = column[item] - page * page_size;
      column[item] = page;
    }
  }
  gather(table.pages.data, table.pages.is_int64, reads.row * table.pages.row_stride, column, slot);
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    readable[item] = readable[item] && slot[item] > 0;  // of a null page, all slots are null
    slot[item] = slot[item] * page_size + in_page[item];
  }
  if (table.full_to_swa.present()) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      readable[item] = readable[item] && slot[item] < table.full_to_swa.size;
      column[item] = readable[item] ? static_cast<uint32_t>(slot[item]) : 0;
    }
    gather(table.full_to_swa.data, table.full_to_swa.is_int64, 0, column, slot);
#pragma unroll
    for (int item = 0; item < kItems; ++item) readable[item] = readable[item] && slot[item] > 0;
  }
}

// Expected tokens of the items, -1 where nothing is known.
template <int kItems>
__device__ __forceinline__ void gather_expected_tokens(const TableVerifyArguments& arguments,
                                                       const RequestReads& reads,
                                                       const int (&position)[kItems],
                                                       int64_t (&token)[kItems]) {
  const IntMatrix& tokens = arguments.history.tokens;
  const bool has_history = tokens.present() && tokens.width > 0 && reads.row < tokens.rows;
#pragma unroll
  for (int item = 0; item < kItems; ++item) token[item] = kUnknown;
  if (!has_history) return;
  const int64_t valid = arguments.history.valid_lens[reads.index];
  const int64_t known = valid < tokens.width ? valid : tokens.width;
  uint32_t column[kItems];
  bool inside[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int64_t at = position[item] + arguments.token_offset;
    inside[item] = at >= 0 && at < known;
    column[item] = inside[item] ? static_cast<uint32_t>(at) : 0;
  }
  gather(tokens.data, tokens.is_int64, reads.row * tokens.row_stride, column, token);
#pragma unroll
  for (int item = 0; item < kItems; ++item) token[item] = inside[item] ? token[item] : kUnknown;
}

// Verifies the positions of one tile: the first of its kItems * 32 positions lends its record to
// the next one and is not judged itself. Returns how many entries this lane looked at.
template <int kItems, bool kFoldsRealKv>
__device__ __forceinline__ unsigned verify_table_tile(const LaunchContext& launch,
                                                      const TableVerifyArguments& arguments,
                                                      const RequestReads& reads, int lender) {
  const int lane = lane_index();
  const bool has_table = has_slot_table(launch);
  // Below the window only a lookup table tells a live slot from what was there before.
  const int lowest = arguments.table.full_to_swa.present() ? 0 : reads.start;
  int position[kItems];
  bool present[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    position[item] = lender + item * kWarpSize + lane;
    present[item] = position[item] >= lowest && position[item] < reads.end;
  }
  int64_t slot[kItems];
  bool readable[kItems];
  gather_slots(arguments.table, reads, position, present, slot, readable);

  // All loads of the tile before the first use. Where there is nothing to read, slot 0 is read.
  Record stored[kItems];
  bool reachable[kItems];
  int32_t state[kItems];
  bool in_flight[kItems];
  uint32_t safe_slot[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    reachable[item] = readable[item] && slot[item] < launch.num_slots;
    safe_slot[item] = reachable[item] ? static_cast<uint32_t>(slot[item]) : 0;
    stored[item] = load_record(launch, safe_slot[item]);
    state[item] = static_cast<int32_t>(kUnknown);
    in_flight[item] = false;
  }
  if (has_table) {
    int64_t writer_step[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      state[item] = *state_of(launch, safe_slot[item]);
      writer_step[item] = *writer_step_of(launch, safe_slot[item]);
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      state[item] &= kStateMask;
      in_flight[item] = arguments.step != kUnknown && writer_step[item] == arguments.step;
    }
  }
  int64_t expected_token[kItems];
  gather_expected_tokens(arguments, reads, position, expected_token);

  unsigned looked_at = 0;
  unsigned bad = 0;  // one bit an item
  unsigned bad_bytes = 0;
  Predecessor before = {Link::kUnknown, 0};  // of lane 0: what lane 31 held one item ago
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const uint64_t chain = chain_behind(stored[item]);
    Link link = reachable[item] && !in_flight[item] ? Link::kKnown : Link::kUnknown;
    if (readable[item] && !reachable[item]) link = Link::kOutOfPool;
    const int below = (lane + kWarpSize - 1) & (kWarpSize - 1);
    const Predecessor from_below = {
        static_cast<Link>(__shfl_sync(kFullWarp, static_cast<int>(link), below)),
        __shfl_sync(kFullWarp, chain, below)};
    Predecessor predecessor = lane == 0 ? before : from_below;
    before = from_below;
    if (position[item] == 0) predecessor = {Link::kKnown, reads.head_chain};

    const bool is_lender = item == 0 && lane == 0;
    const bool judged = position[item] < reads.end && !is_lender &&
                        !(reachable[item] && in_flight[item]);
    looked_at += judged ? 1 : 0;
    VerifyEntry entry;
    entry.expected_position = position[item];
    entry.expected_token = expected_token[item];
    entry.has_prefix_hash = position[item] == reads.prefix_end;
    entry.prefix_hash = reads.prefix_hash;
    const int64_t bits = judge(entry, stored[item], state[item], chain, predecessor);
    bool is_bad = judged && (!reachable[item] || bits != 0);
    if (kFoldsRealKv) {
      const bool asks = judged && reachable[item] && holds_sealed_bytes(state[item]);
      if (real_kv_differs(launch, asks, safe_slot[item], stored[item].real_kv_hash)) {
        is_bad = true;
        bad_bytes |= 1u << item;
      }
    }
    if (is_bad) bad |= 1u << item;
  }

  if (__any_sync(kFullWarp, bad != 0)) {
#pragma unroll 1
    for (int item = 0; item < kItems; ++item) {
      report_table_entries(launch, arguments, reads.index, lender + item * kWarpSize + lane,
                           (bad >> item & 1u) != 0, (bad_bytes >> item & 1u) != 0);
    }
  }
  return looked_at;
}

// Grid: x over the positions of a request, y over requests; both walk on in strides, so any grid
// covers everything.
template <int kItems, bool kFoldsRealKv>
__global__ void __launch_bounds__(kVerifyThreads, kFoldsRealKv ? kFoldingBlocks : 1)
    verify_table_kernel(const __grid_constant__ LaunchContext launch,
                        const __grid_constant__ TableVerifyArguments arguments) {
  __shared__ uint64_t scratch[kVerifyWarps];
  constexpr int kTile = kItems * kWarpSize - 1;  // positions judged
  count_launch(launch);
  const PageTable& table = arguments.table;
  const int warp = static_cast<int>(blockIdx.x) * kVerifyWarps + warp_index();
  unsigned looked_at = 0;
#pragma unroll 1
  for (int64_t index = blockIdx.y; index < arguments.request_rows.size; index += gridDim.y) {
    const int64_t row = arguments.request_rows[index];
    const int64_t prefix_len = arguments.prefix_lens[index];
    if (row == arguments.padding_row || prefix_len <= 0) continue;
    const int64_t start = table.window_start(prefix_len);
    const bool has_row = table.has_row(row);
    if (!has_row || start >= table.positions()) {
      // Nothing that could be read: one entry says so.
      if (warp == 0) {
        const bool reports = lane_index() == 0;
        report_table_entries(launch, arguments, index, has_row ? start : 0, reports, false);
        looked_at += reports ? 1 : 0;
      }
      continue;
    }
    RequestReads reads;
    reads.index = index;
    reads.row = row;
    reads.width = static_cast<int>(table.positions());
    reads.start = static_cast<int>(start);
    reads.end = prefix_len <= reads.width ? static_cast<int>(prefix_len) : reads.width + 1;
    reads.prefix_end = -1;
    reads.prefix_hash = 0;
    if (arguments.prefix_hashes != nullptr && arguments.prefix_hash_valid[index] != 0 &&
        prefix_len <= reads.width) {
      reads.prefix_end = reads.end - 1;
      reads.prefix_hash = static_cast<uint64_t>(arguments.prefix_hashes[index]);
    }
    reads.head_chain = chain_start(
        arguments.identity_keys == nullptr ? 0
                                           : static_cast<uint64_t>(arguments.identity_keys[index]));
#pragma unroll 1
    for (int64_t first = start + static_cast<int64_t>(warp) * kTile; first < reads.end;
         first += static_cast<int64_t>(gridDim.x) * kVerifyWarps * kTile) {
      looked_at += verify_table_tile<kItems, kFoldsRealKv>(launch, arguments, reads,
                                                           static_cast<int>(first) - 1);
    }
  }
  const uint64_t total = block_sum(looked_at, scratch);
  if (threadIdx.x == 0) count_slots(launch, total);
}

// ---- over a materialised plan ------------------------------------------------------------------

struct PlanVerifyArguments {
  const int64_t* slots;  // [capacity], like all that follow
  const int64_t* expected_tokens;  // or null: not compared
  const int64_t* expected_positions;
  const int64_t* prev_slots;
  const int64_t* request_uids;   // or null
  const int64_t* batch_rows;     // or null
  const int64_t* identity_keys;  // or null
  const int32_t* num_valid;
  const int32_t* enable;
  int64_t capacity;
  int64_t step;
};

__device__ __forceinline__ VerifyEntry plan_entry(const PlanVerifyArguments& arguments,
                                                  int64_t index) {
  VerifyEntry entry = {};
  entry.slot = arguments.slots[index];
  entry.readable = true;
  entry.expected_position = arguments.expected_positions[index];
  entry.expected_token =
      arguments.expected_tokens == nullptr ? kUnknown : arguments.expected_tokens[index];
  entry.identity_key = arguments.identity_keys == nullptr ? 0 : arguments.identity_keys[index];
  return entry;
}

__device__ __noinline__ void report_plan_entries(const LaunchContext& launch,
                                                 const PlanVerifyArguments& arguments,
                                                 int64_t index, bool is_bad,
                                                 bool real_kv_differs) {
  VerifyEntry entry = {};
  int64_t prev_slot = kPaddingSlot;
  if (is_bad) {
    entry = plan_entry(arguments, index);
    entry.request_uid =
        arguments.request_uids == nullptr ? kUnknown : arguments.request_uids[index];
    entry.batch_row = arguments.batch_rows == nullptr ? kUnknown : arguments.batch_rows[index];
    prev_slot = arguments.prev_slots[index];
  }
  report_entries(launch, is_bad, entry, prev_slot, real_kv_differs, arguments.step);
}

template <bool kFoldsRealKv>
__global__ void __launch_bounds__(kVerifyThreads)
    verify_plan_kernel(const __grid_constant__ LaunchContext launch,
                       const __grid_constant__ PlanVerifyArguments arguments) {
  __shared__ uint64_t scratch[kVerifyWarps];
  count_launch(launch);
  const int64_t valid = load_now(arguments.enable) == 0 ? 0 : load_now(arguments.num_valid);
  const int64_t count = valid < arguments.capacity ? valid : arguments.capacity;
  const int lane = lane_index();
  unsigned looked_at = 0;
#pragma unroll 1
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kVerifyThreads +
                       warp_index() * kWarpSize;
       first < count; first += static_cast<int64_t>(gridDim.x) * kVerifyThreads) {
    const int64_t index = first + lane;
    const bool present = index < count;
    VerifyEntry entry = {};
    int64_t prev_slot = kPaddingSlot;
    if (present) {
      entry = plan_entry(arguments, index);
      prev_slot = arguments.prev_slots[index];
    }
    const bool is_padding = entry.slot == kPaddingSlot;  // skipped, but counted
    const bool reachable = present && is_reachable(launch, entry);
    Record stored = {};
    int32_t state = static_cast<int32_t>(kUnknown);
    bool in_flight = false;
    if (reachable) {
      stored = load_record(launch, entry.slot);
      state = load_state(launch, entry.slot);
      in_flight = is_in_flight(launch, entry.slot, arguments.step);
    }
    const uint64_t chain = chain_behind(stored);
    const int64_t slot_below = __shfl_up_sync(kFullWarp, entry.slot, 1);
    const uint64_t chain_below = __shfl_up_sync(kFullWarp, chain, 1);
    const bool known_below =
        __shfl_up_sync(kFullWarp, static_cast<int>(reachable && !in_flight), 1) != 0;

    const bool judged = present && !in_flight;
    looked_at += judged ? 1 : 0;
    bool is_bad = judged && !is_padding && !reachable;
    if (judged && reachable) {
      const bool is_below = lane != 0 && known_below && slot_below == prev_slot;
      const Predecessor predecessor =
          is_below ? Predecessor{Link::kKnown, chain_below}
                   : load_predecessor(launch, prev_slot, entry.identity_key, arguments.step);
      is_bad = judge(entry, stored, state, chain, predecessor) != 0;
    }
    bool bad_bytes = false;
    if (kFoldsRealKv) {
      const bool asks = judged && reachable && holds_sealed_bytes(state);
      bad_bytes = real_kv_differs(launch, asks, entry.slot, stored.real_kv_hash);
    }
    is_bad = is_bad || bad_bytes;
    if (__any_sync(kFullWarp, is_bad)) {
      report_plan_entries(launch, arguments, index, is_bad, bad_bytes);
    }
  }
  const uint64_t total = block_sum(looked_at, scratch);
  if (threadIdx.x == 0) count_slots(launch, total);
}

}  // namespace kvcanary
