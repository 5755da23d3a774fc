// The page-table rows that a forward reads, as they stood before it. No framework in here; mirrors
// kernels/snapshot_ref.py.
//
// An entry is what the table holds: a page, or, behind a lookup table, the slot of one position.
#pragma once

#include <cstdint>

#include "integers.h"
#include "record.h"
#include "table.h"

namespace kvcanary {

// Tensors of a TableSnapshot; request vectors are [num_requests].
struct SnapshotTensors {
  IntMatrix entries;     // written through its address
  int64_t* rows;         // row of `entries`, -1: not kept
  int64_t* table_rows;   // row of the page table
  int64_t* prefix_lens;

  KVCANARY_HD void store(int64_t row, int64_t column, int64_t value) const {
    const int64_t index = row * entries.row_stride + column;
    void* data = const_cast<void*>(entries.data);
    if (entries.is_int64) {
      static_cast<int64_t*>(data)[index] = value;
    } else {
      static_cast<int32_t*>(data)[index] = static_cast<int32_t>(value);
    }
  }
};

// Entries of a request's prefix: [first, end).
struct EntryRange {
  int64_t first;
  int64_t end;
};

KVCANARY_HD int64_t positions_per_entry(const PageTable& table) {
  return table.full_to_swa.present() ? 1 : table.page_size;
}

KVCANARY_HD EntryRange entries_of_prefix(const PageTable& table, int64_t prefix_len) {
  const int64_t size = positions_per_entry(table);
  return {table.window_start(prefix_len) / size, (prefix_len + size - 1) / size};
}

// Whether the snapshot can hold what the request reads.
KVCANARY_HD bool can_be_kept(const PageTable& table, const SnapshotTensors& snapshot,
                                    int64_t row, int64_t padding_row, int64_t prefix_len) {
  return row != padding_row && table.has_row(row) && prefix_len > 0 &&
         prefix_len <= table.positions() &&
         entries_of_prefix(table, prefix_len).end <= snapshot.entries.width;
}

// What the table says now. A slot that the lookup table cannot give is 0 or below.
KVCANARY_HD int64_t entry_now(const PageTable& table, int64_t row, int64_t entry) {
  if (!table.full_to_swa.present()) return table.pages.at(row, entry);
  const LiveSlot live = table.live_slot(row, entry);
  return live.readable || live.slot <= kPaddingSlot ? live.slot : kUnknown;
}

// The slot of `position` by an entry that covers it.
KVCANARY_HD int64_t slot_by_entry(const PageTable& table, int64_t entry, int64_t position) {
  const int64_t size = positions_per_entry(table);
  return size == 1 || entry <= 0 ? entry : entry * size + position % size;
}

// As it comes back from the snapshot, whose entries may be narrower.
KVCANARY_HD int64_t as_kept(const SnapshotTensors& snapshot, int64_t entry) {
  return snapshot.entries.is_int64 ? entry : static_cast<int32_t>(entry);
}

// A request whose row is another one now, at the first position of its prefix where it is.
KVCANARY_HD void fill_table_changed(ViolationRow& row, int64_t request_uid,
                                           int64_t batch_row, int64_t position,
                                           int64_t slot_before) {
  row.position = position;
  row.expected_position = position;
  row.expected_aux = slot_before;
  row.request_uid = request_uid;
  row.batch_row = batch_row;
}

}  // namespace kvcanary
