// The launch context as the CPU kernels use it: records, slot states, counters and the ring.
#pragma once

#include <cstdint>

#include "fold.h"
#include "hash.h"
#include "record.h"

namespace kvcanary {

// Entries ahead of the current one whose memory is requested early: slots are scattered, so every
// record is a cache miss of its own.
constexpr int64_t kPrefetchDistance = 16;

// Who wrote a slot last and in which state it is; -1 where nothing is tracked.
struct Provenance {
  int64_t writer_uid = kUnknown;
  int64_t writer_step = kUnknown;
  int64_t slot_state = kUnknown;
};

class Pool {
 public:
  explicit Pool(const LaunchContext& context) : context_(context) {}

  const LaunchContext& context() const { return context_; }

  bool contains(int64_t slot) const {
    return static_cast<uint64_t>(slot) < static_cast<uint64_t>(context_.num_slots);
  }
  bool is_real_slot(int64_t slot) const { return slot != kPaddingSlot && contains(slot); }

  Record& record(int64_t slot) const {
    return *reinterpret_cast<Record*>(context_.records + slot * context_.record_stride);
  }

  // The running hash behind a record: what its successor stores.
  static uint64_t chain_after(const Record& record) {
    return splitmix64_mix3(record.prev_hash, static_cast<uint64_t>(record.token),
                           static_cast<uint64_t>(record.position));
  }

  // ---- the slot table; has_slot_table() first, except for in_flight and provenance -------------
  bool has_slot_table() const { return context_.slot_state != 0; }
  bool tracks_allocation() const { return context_.tracks_allocation != 0; }
  int32_t& state_word(int64_t slot) const { return at<int32_t>(context_.slot_state, slot); }
  int32_t state(int64_t slot) const { return state_word(slot) & kStateMask; }
  void set_state(int64_t slot, int32_t state) const {
    state_word(slot) = (state_word(slot) & ~kStateMask) | state;
  }
  int64_t& owner_uid(int64_t slot) const { return at<int64_t>(context_.owner_uid, slot); }
  int64_t& writer_uid(int64_t slot) const { return at<int64_t>(context_.writer_uid, slot); }
  int64_t& writer_step(int64_t slot) const { return at<int64_t>(context_.writer_step, slot); }

  // Written in the forward `step`; a step of -1 is unknown and matches nothing.
  bool in_flight(int64_t slot, int64_t step) const {
    return has_slot_table() && step != kUnknown && writer_step(slot) == step;
  }

  // Whether the record's real-KV hash stands for bytes.
  bool has_sealed_bytes(int64_t slot) const {
    return !has_slot_table() || state(slot) == kSealed || state(slot) == kExternal;
  }

  Provenance provenance(int64_t slot) const {
    if (!has_slot_table() || !contains(slot)) return {};
    return {writer_uid(slot), writer_step(slot), state(slot)};
  }

  // ---- real KV -----------------------------------------------------------------------------------
  bool folds_real_kv() const { return context_.num_sources > 0; }  // 0 in mode NONE
  uint64_t fold(int64_t slot) const {
    return fold_slot(reinterpret_cast<const Source*>(context_.sources), context_.num_sources, slot);
  }

  // ---- early requests for memory -----------------------------------------------------------------
  void prefetch_for_reading(int64_t slot) const {
    if (!contains(slot)) return;
    __builtin_prefetch(&record(slot));
    if (!has_slot_table()) return;
    __builtin_prefetch(&state_word(slot));
    __builtin_prefetch(&writer_step(slot));
  }
  void prefetch_for_writing(int64_t slot) const {
    if (!contains(slot)) return;
    __builtin_prefetch(&record(slot), 1);
    if (!has_slot_table()) return;
    __builtin_prefetch(&state_word(slot), 1);
    __builtin_prefetch(&owner_uid(slot), 1);
    __builtin_prefetch(&writer_uid(slot), 1);
    __builtin_prefetch(&writer_step(slot), 1);
  }

  // ---- what a launch leaves behind ---------------------------------------------------------------
  void count_launch(int64_t slots) const {
    *reinterpret_cast<int64_t*>(context_.kernel_run_counter) += 1;
    *reinterpret_cast<int64_t*>(context_.slot_run_counter) += slots;
  }

  // Appends a row; kind, provenance and sequence are filled in here. The reader may look at any
  // time: a row without its sequence is not there yet.
  void report(ViolationRow row) const {
    uint32_t& recorded = *reinterpret_cast<uint32_t*>(context_.violation_write_index);
    const uint32_t number = recorded;
    const Provenance writer = provenance(row.slot);
    row.kernel_kind = context_.kernel_kind;
    row.writer_uid = writer.writer_uid;
    row.writer_step = writer.writer_step;
    row.slot_state = writer.slot_state;
    row.sequence = 0;
    ViolationRow& place = at<ViolationRow>(context_.violation_ring,
                                           static_cast<int64_t>(number) % context_.ring_capacity);
    __atomic_store_n(&place.sequence, int64_t{0}, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    place = row;
    __atomic_store_n(&place.sequence, static_cast<int64_t>(number) + 1, __ATOMIC_RELEASE);
    recorded = number + 1;
  }

 private:
  template <typename T>
  static T& at(int64_t address, int64_t index) {
    return reinterpret_cast<T*>(address)[index];
  }

  LaunchContext context_;
};

// A row in which nothing is known but the slot; report() adds kind, provenance and sequence.
inline ViolationRow unknown_row(int64_t slot, int64_t fail_reason_bits, int64_t step) {
  ViolationRow row;
  row.slot = slot;
  row.position = kUnknown;
  row.stored_token = kUnknown;
  row.expected_token = kUnknown;
  row.stored_chain_hash = kUnknown;
  row.expected_aux = kUnknown;
  row.fail_reason_bits = fail_reason_bits;
  row.step = step;
  row.request_uid = kUnknown;
  row.batch_row = kUnknown;
  row.expected_position = kUnknown;
  return row;
}

}  // namespace kvcanary
