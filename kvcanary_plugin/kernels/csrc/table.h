// Reading a page table: where a position's slot stands, and what the lookup table makes of it.
// No framework in here; mirrors kernels/table_ref.py.
#pragma once

#include <cstdint>

#include "integers.h"
#include "record.h"

namespace kvcanary {

// A slot read from outside the page table: beyond every pool, so that it is reported, never read.
constexpr int64_t kOutOfTable = INT64_MAX;

// A slot of the live range and whether its record may be read; if not, it is a value to report.
struct LiveSlot {
  int64_t slot;
  bool readable;
};

struct PageTable {
  IntMatrix pages;
  int64_t page_size;
  IntArray full_to_swa;  // absent: slots are the records' own
  int64_t swa_window_size;

  KVCANARY_HD bool has_row(int64_t row) const { return row >= 0 && row < pages.rows; }

  // Positions that fit into a row.
  KVCANARY_HD int64_t positions() const { return pages.width * page_size; }

  // First position of a prefix that the window still sees.
  KVCANARY_HD int64_t window_start(int64_t prefix_len) const {
    return swa_window_size > 0 && prefix_len > swa_window_size ? prefix_len - swa_window_size : 0;
  }

  // The slot as the table holds it. A page <= 0 stands for itself: all the slots of a null page are
  // the padding slot.
  KVCANARY_HD int64_t raw_slot(int64_t row, int64_t position) const {
    if (!has_row(row) || position >= positions()) return kOutOfTable;
    if (page_size == 1) return pages.at(row, position);
    const int64_t page = pages.at(row, position / page_size);
    return page > 0 ? page * page_size + position % page_size : page;
  }

  // Through the lookup table: `unmapped` for -1, beyond its end, and values <= 0.
  KVCANARY_HD int64_t mapped(int64_t slot, int64_t unmapped) const {
    if (!full_to_swa.present() || slot == kOutOfTable) return slot;
    if (slot < 0 || slot >= full_to_swa.size) return unmapped;
    const int64_t value = full_to_swa[slot];
    return value > 0 ? value : unmapped;
  }

  // The slot to verify at `position`. What may not be read keeps the value that is wrong: a slot
  // <= 0, one that the lookup table cannot know, a mapping <= 0. Outside the table: -1.
  KVCANARY_HD LiveSlot live_slot(int64_t row, int64_t position) const {
    const int64_t raw = raw_slot(row, position);
    if (raw == kOutOfTable) return {kUnknown, false};
    if (raw <= kPaddingSlot) return {raw, false};
    if (!full_to_swa.present()) return {raw, true};
    if (raw >= full_to_swa.size) return {raw, false};
    const int64_t slot = full_to_swa[raw];
    return {slot, slot > kPaddingSlot};
  }

  // The slot of position - 1: the chain's head for position 0, 0 where it is not reachable.
  KVCANARY_HD int64_t predecessor(int64_t row, int64_t position, int64_t start) const {
    if (position == 0) return kChainHead;
    // With a window and no lookup table, what lies below the window may be anything.
    if (position == start && swa_window_size > 0 && !full_to_swa.present()) return kPaddingSlot;
    const int64_t slot = mapped(raw_slot(row, position - 1), kPaddingSlot);
    return slot > kPaddingSlot ? slot : kPaddingSlot;
  }

  // The slot that a request's chain continues from; -1 without a prefix or where not mapped.
  KVCANARY_HD int64_t seed(int64_t row, int64_t prefix_len) const {
    return prefix_len > 0 ? mapped(raw_slot(row, prefix_len - 1), kUnknown) : kUnknown;
  }
};

// The requests' own token history, by table row.
struct TokenHistory {
  IntMatrix tokens;
  IntArray valid_lens;  // by request

  // Token of request `index` at `position` (its offset included); -1 unknown.
  KVCANARY_HD int64_t at(int64_t index, int64_t row, int64_t position) const {
    if (!tokens.present() || row < 0 || row >= tokens.rows) return kUnknown;
    if (position < 0 || position >= tokens.width || position >= valid_lens[index]) return kUnknown;
    return tokens.at(row, position);
  }
};

}  // namespace kvcanary
