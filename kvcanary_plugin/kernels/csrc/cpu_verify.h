// The verify step on the CPU: one function judges an entry, whether it comes from a plan or straight
// from the page table.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu_pool.h"
#include "hash.h"
#include "integers.h"
#include "record.h"
#include "table.h"

namespace kvcanary {

struct VerifyEntry {
  int64_t slot;
  bool readable;  // false: slot is only a value to report, whatever the pool's size
  int64_t expected_position;
  int64_t prev_slot;
  int64_t expected_token;
  uint64_t identity_key;
  int64_t request_uid;
  int64_t batch_row;
  bool has_prefix_hash;
  uint64_t prefix_hash;
};

// Judges one entry. Returns whether it was looked at: one written in this forward is not.
inline bool verify_entry(const Pool& pool, const VerifyEntry& entry, int64_t step) {
  const auto row_for = [&](int64_t bits) {
    ViolationRow row = unknown_row(entry.slot, bits, step);
    row.expected_token = entry.expected_token;
    row.expected_position = entry.expected_position;
    row.request_uid = entry.request_uid;
    row.batch_row = entry.batch_row;
    return row;
  };
  if (!entry.readable || !pool.is_real_slot(entry.slot)) {
    pool.report(row_for(kOutOfPool));
    return true;
  }
  if (pool.in_flight(entry.slot, step)) return false;
  const Record& record = pool.record(entry.slot);

  // The anchor at the head, the record before elsewhere, nothing (the record's own value) where that
  // one is unreachable (slot 0), outside the pool, or being written in this forward.
  int64_t bits = 0;
  uint64_t expected_chain = record.prev_hash;
  if (entry.prev_slot == kChainHead) {
    expected_chain = chain_start(entry.identity_key);
  } else if (!pool.contains(entry.prev_slot)) {
    bits |= kOutOfPool;
  } else if (entry.prev_slot != kPaddingSlot && !pool.in_flight(entry.prev_slot, step)) {
    expected_chain = Pool::chain_after(pool.record(entry.prev_slot));
  }
  if (record.prev_hash != expected_chain) bits |= kVerifyChainHash;
  if (entry.expected_token != kUnknown && record.token != entry.expected_token) {
    bits |= kVerifyToken;
  }
  if (record.position != entry.expected_position) bits |= kVerifyPosition;
  if (entry.has_prefix_hash && Pool::chain_after(record) != entry.prefix_hash) {
    bits |= kPrefixIdentity;
  }
  if (pool.has_slot_table()) {
    const int32_t state = pool.state(entry.slot);
    if (state == kFree) bits |= kFreedRead;
    if (state == kAllocated) bits = kUnwrittenRead;  // what else differs says nothing
  }
  if (pool.folds_real_kv() && pool.has_sealed_bytes(entry.slot) &&
      pool.fold(entry.slot) != record.real_kv_hash) {
    bits |= kVerifyRealKvHash;
  }
  if (bits != 0) {
    ViolationRow row = row_for(bits);
    row.position = record.position;
    row.stored_token = record.token;
    row.stored_chain_hash = static_cast<int64_t>(record.prev_hash);
    row.expected_aux = static_cast<int64_t>(expected_chain);
    pool.report(row);
  }
  return true;
}

// ---- over a plan ---------------------------------------------------------------------------------

struct VerifyPlanArguments {
  const int64_t* slots;
  const int64_t* expected_tokens;  // null: tokens are not compared
  const int64_t* expected_positions;
  const int64_t* prev_slots;
  int64_t num_entries;           // already clamped to the capacity; 0 when the plan is disabled
  const int64_t* request_uids;   // or null: all unknown
  const int64_t* batch_rows;     // or null: all unknown
  const int64_t* identity_keys;  // or null: all 0
  int64_t step;
};

inline void verify_plan(const Pool& pool, const VerifyPlanArguments& arguments) {
  int64_t looked_at = 0;
  for (int64_t index = 0; index < arguments.num_entries; ++index) {
    if (index + kPrefetchDistance < arguments.num_entries) {
      pool.prefetch_for_reading(arguments.slots[index + kPrefetchDistance]);
    }
    if (arguments.slots[index] == kPaddingSlot) {
      ++looked_at;
      continue;
    }
    const VerifyEntry entry{
        arguments.slots[index],
        true,
        arguments.expected_positions[index],
        arguments.prev_slots[index],
        arguments.expected_tokens ? arguments.expected_tokens[index] : kUnknown,
        arguments.identity_keys ? static_cast<uint64_t>(arguments.identity_keys[index]) : 0,
        arguments.request_uids ? arguments.request_uids[index] : kUnknown,
        arguments.batch_rows ? arguments.batch_rows[index] : kUnknown,
        false,
        0};
    looked_at += verify_entry(pool, entry, arguments.step);
  }
  pool.count_launch(looked_at);
}

// ---- from the page table -------------------------------------------------------------------------

struct VerifyTableArguments {
  PageTable table;
  int64_t padding_row;
  IntArray request_rows;
  const int64_t* request_uids;
  IntArray prefix_lens;
  const int64_t* identity_keys;  // or null: all 0
  TokenHistory history;
  int64_t token_offset;
  const int64_t* prefix_hashes;      // or null: nothing to compare
  const int32_t* prefix_hash_valid;  // together with prefix_hashes
  int64_t step;
};

// Verifies what one request reads; returns the entries looked at.
inline int64_t verify_request(const Pool& pool, const VerifyTableArguments& arguments,
                              int64_t index) {
  const PageTable& table = arguments.table;
  const int64_t row = arguments.request_rows[index];
  const int64_t prefix_len = arguments.prefix_lens[index];
  if (row == arguments.padding_row || prefix_len <= 0) return 0;

  VerifyEntry entry{};
  entry.identity_key =
      arguments.identity_keys ? static_cast<uint64_t>(arguments.identity_keys[index]) : 0;
  entry.request_uid = arguments.request_uids[index];
  entry.batch_row = index;
  const bool knows_prefix_hash =
      arguments.prefix_hashes != nullptr && arguments.prefix_hash_valid[index] != 0;

  // One entry stands for everything outside the table.
  const auto report_outside = [&](int64_t position) {
    entry.slot = kUnknown;
    entry.readable = false;
    entry.expected_position = position;
    entry.expected_token = arguments.history.at(index, row, position + arguments.token_offset);
    return static_cast<int64_t>(verify_entry(pool, entry, arguments.step));
  };
  if (!table.has_row(row)) return report_outside(0);

  const int64_t start = table.window_start(prefix_len);
  const int64_t end = std::min(prefix_len, std::max(start, table.positions()));
  int64_t looked_at = 0;
  for (int64_t position = start; position < end; ++position) {
    if (position + kPrefetchDistance < end) {
      pool.prefetch_for_reading(table.live_slot(row, position + kPrefetchDistance).slot);
    }
    const LiveSlot live = table.live_slot(row, position);
    entry.slot = live.slot;
    entry.readable = live.readable;
    entry.expected_position = position;
    entry.prev_slot = table.predecessor(row, position, start);
    entry.expected_token = arguments.history.at(index, row, position + arguments.token_offset);
    entry.has_prefix_hash = knows_prefix_hash && position == prefix_len - 1;
    if (entry.has_prefix_hash) {
      entry.prefix_hash = static_cast<uint64_t>(arguments.prefix_hashes[index]);
    }
    looked_at += verify_entry(pool, entry, arguments.step);
  }
  return end < prefix_len ? looked_at + report_outside(end) : looked_at;
}

inline void verify_table(const Pool& pool, const VerifyTableArguments& arguments) {
  int64_t looked_at = 0;
  for (int64_t index = 0; index < arguments.request_rows.size; ++index) {
    looked_at += verify_request(pool, arguments, index);
  }
  pool.count_launch(looked_at);
}

}  // namespace kvcanary
