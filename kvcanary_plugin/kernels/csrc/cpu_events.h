// Lifecycle events on the CPU: slot states follow the allocator, in the order of its calls.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_pool.h"
#include "record.h"

namespace kvcanary {

inline int64_t event_entry(int64_t address, int64_t element_bytes, int64_t index) {
  return element_bytes == 4 ? reinterpret_cast<const int32_t*>(address)[index]
                            : reinterpret_cast<const int64_t*>(address)[index];
}

inline void report_event(const Pool& pool, int64_t slot, int64_t reason, int64_t step) {
  const Record& record = pool.record(slot);
  ViolationRow row = unknown_row(slot, reason, step);
  row.position = record.position;
  row.stored_token = record.token;
  row.stored_chain_hash = static_cast<int64_t>(record.prev_hash);
  pool.report(row);
}

inline void alloc_slot(const Pool& pool, int64_t slot, int64_t step) {
  if (pool.state(slot) != kFree) report_event(pool, slot, kDoubleAlloc, step);
  const uint32_t generation =
      (static_cast<uint32_t>(pool.state_word(slot)) & ~static_cast<uint32_t>(kStateMask)) +
      kGeneration;
  pool.state_word(slot) = static_cast<int32_t>(generation | kAllocated);
  pool.owner_uid(slot) = kUnknown;
}

// A page may be partly filled: it was free already only if all of it was.
inline void free_slots(const Pool& pool, int64_t first, int64_t count, int64_t step) {
  bool was_free = true;
  for (int64_t slot = first; slot < first + count; ++slot) {
    was_free = was_free && pool.state(slot) == kFree;
  }
  if (was_free) report_event(pool, first, kDoubleFree, step);
  for (int64_t slot = first; slot < first + count; ++slot) {
    pool.set_state(slot, kFree);
    pool.owner_uid(slot) = kUnknown;
  }
}

struct MovedSlot {
  int64_t destination;
  Record record;
  int32_t state_word;
  int64_t owner_uid, writer_uid, writer_step;
};

// Everything is read before anything is stored, as the engine's own move does.
inline void move_slots(const Pool& pool, const Event& event) {
  std::vector<MovedSlot> moved;
  for (int64_t index = 0; index < event.count; ++index) {
    const int64_t source = event_entry(event.slots, event.element_bytes, index);
    const int64_t destination = event_entry(event.destinations, event.element_bytes, index);
    if (!pool.is_real_slot(source) || !pool.is_real_slot(destination)) continue;
    moved.push_back({destination, pool.record(source), pool.state_word(source),
                     pool.owner_uid(source), pool.writer_uid(source), pool.writer_step(source)});
  }
  for (const MovedSlot& slot : moved) {
    pool.record(slot.destination) = slot.record;
    pool.state_word(slot.destination) = slot.state_word;
    pool.owner_uid(slot.destination) = slot.owner_uid;
    pool.writer_uid(slot.destination) = slot.writer_uid;
    pool.writer_step(slot.destination) = slot.writer_step;
  }
}

inline void apply_event(const Pool& pool, const Event& event, int64_t step) {
  if (event.kind == kEventReset) {
    for (int64_t slot = 0; slot < pool.context().num_slots; ++slot) {
      pool.set_state(slot, kFree);
      pool.owner_uid(slot) = kUnknown;
    }
    return;
  }
  if (event.kind == kEventMove) {
    move_slots(pool, event);
    return;
  }
  for (int64_t index = 0; index < event.count; ++index) {
    const int64_t entry = event_entry(event.slots, event.element_bytes, index);
    if (entry <= 0 || entry >= pool.context().num_slots / event.page_size) continue;
    const int64_t first = entry * event.page_size;
    if (event.kind == kEventFree) {
      free_slots(pool, first, event.page_size, step);
      continue;
    }
    for (int64_t slot = first; slot < first + event.page_size; ++slot) {
      alloc_slot(pool, slot, step);
    }
  }
}

inline void apply_events(const Pool& pool, const Event* events, int64_t count, int64_t step) {
  if (!pool.has_slot_table()) return;
  for (int64_t index = 0; index < count; ++index) apply_event(pool, events[index], step);
}

}  // namespace kvcanary
