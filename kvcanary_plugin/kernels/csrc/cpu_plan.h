// Filling plans from the page table, marking slots, translating slots: the CPU side.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu_pool.h"
#include "integers.h"
#include "record.h"
#include "table.h"

namespace kvcanary {

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

struct Batch {
  IntArray request_rows;
  IntArray prefix_lens;
  IntArray extend_lens;
  int64_t padding_row;

  int64_t size() const { return request_rows.size; }
  int64_t extend_len(int64_t index) const { return std::max<int64_t>(extend_lens[index], 0); }
};

// What lies behind the batch's requests in the plan stays untouched.
inline void fill_write_plan(const WritePlanOut& plan, const PageTable& table, const Batch& batch) {
  plan.offsets[0] = 0;
  for (int64_t index = 0; index < batch.size(); ++index) {
    const int64_t row = batch.request_rows[index], prefix_len = batch.prefix_lens[index];
    plan.offsets[index + 1] = plan.offsets[index] + batch.extend_len(index);
    plan.seeds[index] = row == batch.padding_row ? kUnknown : table.seed(row, prefix_len);
  }
  *plan.num_valid = static_cast<int32_t>(batch.size());
}

inline void fill_verify_plan(const VerifyPlanOut& plan, const PageTable& table, const Batch& batch,
                             const TokenHistory& history, int64_t token_offset) {
  const auto reads = [&](int64_t index) {
    return batch.request_rows[index] != batch.padding_row && batch.prefix_lens[index] > 0;
  };
  int64_t total = 0;
  bool fits = true;
  for (int64_t index = 0; index < batch.size() && fits; ++index) {
    if (!reads(index)) continue;
    const int64_t prefix_len = batch.prefix_lens[index];
    const int64_t entries = prefix_len - table.window_start(prefix_len);
    fits = entries <= plan.capacity - total;
    if (fits) total += entries;
  }
  *plan.enable = fits ? 1 : 0;
  *plan.num_valid = fits ? static_cast<int32_t>(total) : 0;
  if (!fits) return;

  int64_t entry = 0;
  for (int64_t index = 0; index < batch.size(); ++index) {
    if (!reads(index)) continue;
    const int64_t row = batch.request_rows[index], prefix_len = batch.prefix_lens[index];
    const int64_t start = table.window_start(prefix_len);
    for (int64_t position = start; position < prefix_len; ++position, ++entry) {
      plan.slots[entry] = table.mapped(table.raw_slot(row, position), kPaddingSlot);
      plan.expected_tokens[entry] = history.at(index, row, position + token_offset);
      plan.expected_positions[entry] = position;
      plan.prev_slots[entry] = table.predecessor(row, position, start);
    }
  }
}

// Marks the slots that this forward is about to write.
inline void mark_written(const Pool& pool, const Batch& batch, const IntArray& out_cache_loc,
                         int64_t step) {
  if (!pool.has_slot_table()) return;
  int64_t tokens = 0;
  for (int64_t index = 0; index < batch.size(); ++index) tokens += batch.extend_len(index);
  for (int64_t entry = 0; entry < std::min(tokens, out_cache_loc.size); ++entry) {
    const int64_t slot = out_cache_loc[entry];
    if (pool.is_real_slot(slot)) pool.writer_step(slot) = step;
  }
}

}  // namespace kvcanary
