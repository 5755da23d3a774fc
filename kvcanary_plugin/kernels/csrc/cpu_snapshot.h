// Taking a snapshot of page-table rows and comparing the table with it: the CPU side.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu_pool.h"
#include "snapshot.h"

namespace kvcanary {

struct SnapshotArguments {
  PageTable table;
  int64_t padding_row;
  IntArray request_rows;
  IntArray prefix_lens;
  int64_t first_request;
  SnapshotTensors snapshot;
};

inline void take_snapshot(const SnapshotArguments& arguments) {
  const PageTable& table = arguments.table;
  const SnapshotTensors& snapshot = arguments.snapshot;
  for (int64_t request = 0; request < arguments.request_rows.size; ++request) {
    const int64_t row = arguments.request_rows[request];
    const int64_t prefix_len = arguments.prefix_lens[request];
    const int64_t kept_row = request - arguments.first_request;
    const bool kept = kept_row >= 0 && kept_row < snapshot.entries.rows &&
                      can_be_kept(table, snapshot, row, arguments.padding_row, prefix_len);
    snapshot.rows[request] = kept ? kept_row : kUnknown;
    snapshot.table_rows[request] = row;
    snapshot.prefix_lens[request] = prefix_len;
    if (!kept) continue;
    const EntryRange range = entries_of_prefix(table, prefix_len);
    for (int64_t entry = range.first; entry < range.end; ++entry) {
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

inline void compare_tables(const Pool& pool, const CompareArguments& arguments) {
  const PageTable& table = arguments.table;
  const SnapshotTensors& snapshot = arguments.snapshot;
  for (int64_t request = 0; request < arguments.num_requests; ++request) {
    const int64_t kept_row = snapshot.rows[request], row = snapshot.table_rows[request];
    const int64_t prefix_len = snapshot.prefix_lens[request];
    if (kept_row < 0) continue;
    const EntryRange range = entries_of_prefix(table, prefix_len);
    for (int64_t entry = range.first; entry < range.end; ++entry) {
      const int64_t before = snapshot.entries.at(kept_row, entry);
      const int64_t now = entry_now(table, row, entry);
      if (as_kept(snapshot, now) == before) continue;
      const int64_t position =
          std::max(entry * positions_per_entry(table), table.window_start(prefix_len));
      ViolationRow changed =
          unknown_row(slot_by_entry(table, now, position), kTableChanged, arguments.step);
      fill_table_changed(changed, arguments.request_uids[request], request, position,
                         slot_by_entry(table, before, position));
      pool.report(changed);
      break;
    }
  }
}

}  // namespace kvcanary
