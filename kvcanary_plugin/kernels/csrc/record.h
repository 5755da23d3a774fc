// Layouts shared by host and device code: record, source row, launch context, violation row.
// Mirrors kernels/consts.py and kernels/context.py. No framework in here.
#pragma once

#include <cstdint>

namespace kvcanary {

struct Record {
  int64_t token;
  int64_t position;
  uint64_t prev_hash;
  uint64_t real_kv_hash;
};
static_assert(sizeof(Record) == 32, "the record is 32 bytes");

constexpr int64_t kPaddingSlot = 0;
constexpr int64_t kChainHead = -1;
constexpr int64_t kUnknown = -1;
constexpr int64_t kPartialReadBytes = 16;

// One row of the source table (int64 [num_sources, 5] beside the records).
struct Source {
  int64_t data;            // address of row 0
  int64_t row_stride;      // bytes from row to row
  int64_t page_size;       // slots per row
  int64_t bytes_per_slot;  // bytes of one slot
  int64_t read_bytes;      // bytes that this launch folds (mode already applied)
};
static_assert(sizeof(Source) == 40, "five int64 a source");

enum FailReason : int64_t {
  kVerifyChainHash = 1 << 0,
  kVerifyPosition = 1 << 1,
  kVerifyRealKvHash = 1 << 2,
  kWriteToken = 1 << 3,
  kWritePosition = 1 << 4,
  kVerifyToken = 1 << 5,
  kUnwrittenRead = 1 << 6,
  kFreedRead = 1 << 7,
  kOutOfPool = 1 << 8,
  kWriteOwned = 1 << 9,
  kDoubleFree = 1 << 10,
  kDoubleAlloc = 1 << 11,
  kPrefixIdentity = 1 << 12,
  kTableChanged = 1 << 13,
};

enum SlotState : int32_t { kFree = 0, kAllocated = 1, kWritten = 2, kSealed = 3, kExternal = 4 };
constexpr int32_t kStateMask = 0xFF;
constexpr uint32_t kGeneration = 1u << 8;  // one allocation, in the upper bits of the state word

enum EventKind : int64_t {
  kEventAlloc = 0,
  kEventFree = 1,
  kEventMove = 2,
  kEventReset = 5,
};

// One lifecycle event: a row of the int64 [k, 6] table that the prepare launch takes on the host.
struct Event {
  int64_t kind;           // EventKind
  int64_t slots;          // address of int32 | int64 [count]
  int64_t count;
  int64_t element_bytes;  // 4 | 8
  int64_t page_size;      // slots of each entry; 1: entries are slots
  int64_t destinations;   // address, kEventMove only
};
static_assert(sizeof(Event) == 48, "six int64 an event");

struct ViolationRow {
  int64_t kernel_kind;
  int64_t slot;
  int64_t position;
  int64_t stored_token;
  int64_t expected_token;
  int64_t stored_chain_hash;
  int64_t expected_aux;
  int64_t fail_reason_bits;
  int64_t step;
  int64_t request_uid;
  int64_t writer_uid;
  int64_t writer_step;
  int64_t batch_row;
  int64_t slot_state;
  int64_t expected_position;
  int64_t sequence;  // n + 1, written last
};
static_assert(sizeof(ViolationRow) == 128, "sixteen int64 a row");

// The static part of a launch, packed once per VerifyOrWriteContext as int64 [20] on the host and
// passed to the kernels by value. Addresses are device addresses; 0 stands for an absent tensor.
struct LaunchContext {
  int64_t records;         // uint8 [num_slots, record_stride]
  int64_t num_slots;
  int64_t record_stride;   // bytes
  int64_t violation_ring;  // int64 [ring_capacity, 16]
  int64_t ring_capacity;
  int64_t violation_write_index;  // int32 [1]
  int64_t slot_run_counter;       // int64 [1]
  int64_t kernel_run_counter;     // int64 [1]
  int64_t counter_mirror;         // int64 [2], pinned host memory, or 0
  int64_t chain_position_assert;  // int32 [1]
  int64_t slot_state;             // int32 [num_slots], or 0: no slot table
  int64_t owner_uid;              // int64 [num_slots], or 0
  int64_t writer_uid;             // int64 [num_slots], or 0
  int64_t writer_step;            // int64 [num_slots], or 0
  int64_t tracks_allocation;      // 0 | 1
  int64_t sources;                // Source [num_sources] on the device, or 0
  int64_t num_sources;            // 0 in mode NONE
  int64_t hash_mode;              // RealKvHashMode
  int64_t kernel_kind;
  int64_t device_index;           // CUDA ordinal, -1 on CPU
};
static_assert(sizeof(LaunchContext) == 160, "twenty int64");

}  // namespace kvcanary
