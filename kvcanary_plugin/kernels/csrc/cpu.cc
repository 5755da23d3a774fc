// The raw functions on the CPU. Each reads as three acts: check the arguments, gather them, run.
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstdint>

#include "checks.h"
#include "cpu_events.h"
#include "cpu_plan.h"
#include "cpu_pool.h"
#include "cpu_snapshot.h"
#include "cpu_verify.h"
#include "cpu_write.h"
#include "hash.h"
#include "integers.h"
#include "record.h"
#include "table.h"

namespace kvcanary {
namespace {

constexpr DLDevice kHost{kDLCPU, 0};

Pool pool_of(const TensorView& launch) {
  const LaunchContext context = read_launch(launch);
  KVCANARY_CHECK(context.device_index < 0)
      << "launch must belong to records on the CPU, got device cuda:" << context.device_index;
  return Pool(context);
}

// write_num_valid_reqs and write_offsets of a plan; the count is clamped to what the plan holds.
int64_t num_requests(const TensorView& num_valid_reqs, const TensorView& write_offsets) {
  const int32_t valid = *int32_scalar(num_valid_reqs, "plan.write_num_valid_reqs", kHost);
  return std::clamp<int64_t>(valid, 0, write_offsets.numel() - 1);
}

const int64_t* checked_offsets(const TensorView& write_offsets) {
  const int64_t* offsets = int64_vector(write_offsets, "plan.write_offsets", kHost);
  check_at_least(write_offsets.numel(), "plan.write_offsets size", 2);
  return offsets;
}

WritePlanOut write_plan_out(const TensorView& write_offsets, const TensorView& seed_slots,
                            const TensorView& num_valid_reqs, int64_t num_requests) {
  const WritePlanOut plan{int64_vector(write_offsets, "plan.write_offsets", kHost),
                          int64_vector(seed_slots, "plan.write_seed_slot_indices", kHost),
                          int32_scalar(num_valid_reqs, "plan.write_num_valid_reqs", kHost)};
  const int64_t capacity = seed_slots.numel();
  check_at_least(capacity, "plan.write_seed_slot_indices size", 1);
  check_size("plan.write_offsets", write_offsets.numel(), capacity + 1, "the seeds and one more");
  KVCANARY_CHECK(num_requests <= capacity)
      << "a batch of " << num_requests << " requests does not fit into a write plan for "
      << capacity;
  return plan;
}

PageTable page_table_of(const TensorView& page_table, const char* name, int64_t page_size,
                        const Optional<TensorView>& full_to_swa, int64_t swa_window_size) {
  check_at_least(page_size, "page_size", 1);
  check_at_least(swa_window_size, "swa_window_size", 0);
  if (full_to_swa.has_value()) {
    check_at_least(full_to_swa.value().numel(), "full_to_swa_index_mapping size", 1);
  }
  return {integer_matrix(page_table, name, kHost), page_size,
          optional_integers(full_to_swa, "full_to_swa_index_mapping", kHost), swa_window_size};
}

TokenHistory history_of(const Optional<TensorView>& tokens, const Optional<TensorView>& valid_lens,
                        int64_t num_requests) {
  check_together(tokens.has_value(), "expected_tokens", valid_lens.has_value(),
                 "expected_valid_lens");
  return {optional_integer_matrix(tokens, "expected_tokens", kHost),
          optional_integers(valid_lens, "expected_valid_lens", kHost, num_requests,
                            "request_rows")};
}

Batch batch_of(const TensorView& request_rows, const TensorView& prefix_lens,
               const TensorView& extend_lens, int64_t padding_row) {
  const int64_t size = request_rows.numel();
  return {integers(request_rows, "request_rows", kHost),
          integers(prefix_lens, "prefix_lens", kHost, size, "request_rows"),
          integers(extend_lens, "extend_lens", kHost, size, "request_rows"), padding_row};
}

void canary_write(TensorView launch, TensorView write_offsets, TensorView seed_slots,
                  TensorView num_valid_reqs, Optional<TensorView> request_uids,
                  Optional<TensorView> identity_keys, TensorView input_ids, TensorView positions,
                  TensorView out_cache_loc, Optional<TensorView> expected_tokens,
                  Optional<TensorView> expected_positions, int64_t step, bool /*beside*/) {
  const Pool pool = pool_of(launch);
  const int64_t capacity = seed_slots.numel(), entries = input_ids.numel();
  const char* const seeds_name = "plan.write_seed_slot_indices";
  WriteArguments arguments{};
  arguments.write_offsets = checked_offsets(write_offsets);
  arguments.seed_slots = int64_vector(seed_slots, seeds_name, kHost);
  check_size("plan.write_offsets", write_offsets.numel(), capacity + 1, "the seeds and one more");
  arguments.num_requests = num_requests(num_valid_reqs, write_offsets);
  arguments.request_uids = optional_int64_vector(request_uids, "plan.write_request_uids", kHost,
                                                 capacity, seeds_name);
  arguments.identity_keys = optional_int64_vector(identity_keys, "plan.write_identity_keys", kHost,
                                                  capacity, seeds_name);
  arguments.input_ids = integers(input_ids, "input_ids", kHost);
  arguments.positions = integers(positions, "positions", kHost, entries, "input_ids");
  arguments.out_cache_loc = integers(out_cache_loc, "out_cache_loc", kHost, entries, "input_ids");
  check_together(expected_tokens.has_value(), "expected_input_tokens",
                 expected_positions.has_value(), "expected_input_positions");
  arguments.expected_tokens =
      optional_integers(expected_tokens, "expected_input_tokens", kHost, entries, "input_ids");
  arguments.expected_positions = optional_integers(expected_positions, "expected_input_positions",
                                                   kHost, entries, "input_ids");
  arguments.step = step;

  write_records(pool, arguments);
}

void canary_verify_plan(TensorView launch, TensorView slots, TensorView expected_tokens,
                        TensorView expected_positions, TensorView prev_slots, TensorView num_valid,
                        TensorView enable, Optional<TensorView> request_uids,
                        Optional<TensorView> batch_rows, Optional<TensorView> identity_keys,
                        bool check_expected_token, int64_t step) {
  const Pool pool = pool_of(launch);
  const char* const slots_name = "plan.verify_slot_indices";
  const int64_t capacity = slots.numel();
  check_at_least(capacity, "plan.verify_slot_indices size", 1);
  const auto column = [&](const Optional<TensorView>& tensor, const char* name) {
    return optional_int64_vector(tensor, name, kHost, capacity, slots_name);
  };
  VerifyPlanArguments arguments{};
  arguments.slots = int64_vector(slots, slots_name, kHost);
  arguments.expected_tokens = column(expected_tokens, "plan.verify_expected_tokens");
  if (!check_expected_token) arguments.expected_tokens = nullptr;
  arguments.expected_positions = column(expected_positions, "plan.verify_expected_positions");
  arguments.prev_slots = column(prev_slots, "plan.verify_prev_slot_indices");
  const int32_t valid = *int32_scalar(num_valid, "plan.verify_num_valid", kHost);
  const bool enabled = *int32_scalar(enable, "plan.enable", kHost) != 0;
  arguments.num_entries = enabled ? std::clamp<int64_t>(valid, 0, capacity) : 0;
  arguments.request_uids = column(request_uids, "plan.verify_request_uids");
  arguments.batch_rows = column(batch_rows, "plan.verify_batch_rows");
  arguments.identity_keys = column(identity_keys, "plan.verify_identity_keys");
  arguments.step = step;

  verify_plan(pool, arguments);
}

void canary_verify_table(TensorView launch, TensorView page_table, int64_t page_size,
                         int64_t padding_row, TensorView request_rows, TensorView request_uids,
                         TensorView prefix_lens, int64_t max_prefix_len,
                         Optional<TensorView> full_to_swa, int64_t swa_window_size,
                         Optional<TensorView> identity_keys, Optional<TensorView> expected_tokens,
                         Optional<TensorView> expected_valid_lens, int64_t token_offset,
                         Optional<TensorView> prefix_hashes, Optional<TensorView> prefix_hash_valid,
                         int64_t step) {
  const Pool pool = pool_of(launch);
  const int64_t size = request_rows.numel();
  const char* const like = "request_rows";
  check_at_least(max_prefix_len, "max_prefix_len", 0);
  VerifyTableArguments arguments{};
  arguments.table =
      page_table_of(page_table, "page_table", page_size, full_to_swa, swa_window_size);
  arguments.padding_row = padding_row;
  arguments.request_rows = integers(request_rows, "request_rows", kHost);
  arguments.request_uids = int64_vector(request_uids, "request_uids", kHost);
  check_size("request_uids", request_uids.numel(), size, like);
  arguments.prefix_lens = integers(prefix_lens, "prefix_lens", kHost, size, like);
  arguments.identity_keys =
      optional_int64_vector(identity_keys, "identity_keys", kHost, size, like);
  arguments.history = history_of(expected_tokens, expected_valid_lens, size);
  arguments.token_offset = token_offset;
  check_together(prefix_hashes.has_value(), "prefix_hashes", prefix_hash_valid.has_value(),
                 "prefix_hash_valid");
  arguments.prefix_hashes =
      optional_int64_vector(prefix_hashes, "prefix_hashes", kHost, size, like);
  arguments.prefix_hash_valid =
      optional_int32_vector(prefix_hash_valid, "prefix_hash_valid", kHost, size, like);
  arguments.step = step;

  verify_table(pool, arguments);
}

void canary_plan(TensorView verify_slots, TensorView verify_tokens, TensorView verify_positions,
                 TensorView verify_prev_slots, TensorView verify_num_valid, TensorView enable,
                 TensorView write_offsets, TensorView seed_slots, TensorView num_valid_reqs,
                 TensorView request_rows, TensorView prefix_lens, TensorView extend_lens,
                 TensorView page_table, int64_t page_size, int64_t padding_row,
                 int64_t swa_window_size, Optional<TensorView> full_to_swa,
                 Optional<TensorView> expected_tokens, Optional<TensorView> expected_valid_lens,
                 int64_t token_offset) {
  const int64_t capacity = verify_slots.numel();
  const auto column = [&](const TensorView& tensor, const char* name) {
    int64_t* data = int64_vector(tensor, name, kHost);
    check_size(name, tensor.numel(), capacity, "plan.verify_slot_indices");
    return data;
  };
  const VerifyPlanOut verify_plan{column(verify_slots, "plan.verify_slot_indices"),
                                  column(verify_tokens, "plan.verify_expected_tokens"),
                                  column(verify_positions, "plan.verify_expected_positions"),
                                  column(verify_prev_slots, "plan.verify_prev_slot_indices"),
                                  int32_scalar(verify_num_valid, "plan.verify_num_valid", kHost),
                                  int32_scalar(enable, "plan.enable", kHost),
                                  capacity};
  const Batch batch = batch_of(request_rows, prefix_lens, extend_lens, padding_row);
  const WritePlanOut write_plan =
      write_plan_out(write_offsets, seed_slots, num_valid_reqs, batch.size());
  const PageTable table =
      page_table_of(page_table, "req_to_token", page_size, full_to_swa, swa_window_size);
  const TokenHistory history = history_of(expected_tokens, expected_valid_lens, batch.size());

  fill_write_plan(write_plan, table, batch);
  fill_verify_plan(verify_plan, table, batch, history, token_offset);
}

void canary_prepare(TensorView launch, TensorView write_offsets, TensorView seed_slots,
                    TensorView num_valid_reqs, Optional<TensorView> plan_uids,
                    Optional<TensorView> plan_keys, TensorView page_table, int64_t page_size,
                    int64_t padding_row, TensorView request_rows, TensorView request_uids,
                    TensorView prefix_lens, TensorView extend_lens,
                    Optional<TensorView> full_to_swa, Optional<TensorView> identity_keys,
                    TensorView out_cache_loc, Optional<TensorView> events, int64_t step) {
  const Pool pool = pool_of(launch);
  const Batch batch = batch_of(request_rows, prefix_lens, extend_lens, padding_row);
  const WritePlanOut plan = write_plan_out(write_offsets, seed_slots, num_valid_reqs, batch.size());
  const int64_t capacity = seed_slots.numel();
  const char* const seeds_name = "plan.write_seed_slot_indices";
  int64_t* uids_out =
      optional_int64_vector(plan_uids, "plan.write_request_uids", kHost, capacity, seeds_name);
  int64_t* keys_out =
      optional_int64_vector(plan_keys, "plan.write_identity_keys", kHost, capacity, seeds_name);
  const PageTable table = page_table_of(page_table, "page_table", page_size, full_to_swa, 0);
  const int64_t* uids = int64_vector(request_uids, "request_uids", kHost);
  check_size("request_uids", request_uids.numel(), batch.size(), "request_rows");
  const int64_t* keys =
      optional_int64_vector(identity_keys, "identity_keys", kHost, batch.size(), "request_rows");
  const IntArray slots = integers(out_cache_loc, "out_cache_loc", kHost);
  const EventList happened = event_list(events);

  apply_events(pool, happened.rows, happened.count, step);
  fill_write_plan(plan, table, batch);
  if (uids_out != nullptr) std::copy_n(uids, batch.size(), uids_out);
  if (keys_out != nullptr && keys != nullptr) std::copy_n(keys, batch.size(), keys_out);
  if (keys_out != nullptr && keys == nullptr) std::fill_n(keys_out, batch.size(), 0);
  mark_written(pool, batch, slots, step);
  pool.count_launch(0);
}

void canary_seal(TensorView launch, TensorView write_offsets, TensorView num_valid_reqs,
                 TensorView out_cache_loc, int64_t /*step*/) {
  const Pool pool = pool_of(launch);
  const int64_t* offsets = checked_offsets(write_offsets);
  const int64_t requests = num_requests(num_valid_reqs, write_offsets);
  const IntArray slots = integers(out_cache_loc, "out_cache_loc", kHost);

  const int64_t entries = std::min(offsets[requests], slots.size);
  int64_t sealed = 0;
  for (int64_t entry = 0; entry < entries && pool.folds_real_kv(); ++entry) {
    const int64_t slot = slots[entry];
    if (!pool.is_real_slot(slot)) continue;
    pool.record(slot).real_kv_hash = pool.fold(slot);
    if (pool.has_slot_table() && pool.state(slot) == kWritten) pool.set_state(slot, kSealed);
    ++sealed;
  }
  pool.count_launch(sealed);
}

// Folds a slot again and compares; returns whether it was one to look at.
bool scrub_slot(const Pool& pool, int64_t slot, int64_t step) {
  if (!pool.is_real_slot(slot) || !pool.has_sealed_bytes(slot)) return false;
  const Record& record = pool.record(slot);
  if (pool.fold(slot) == record.real_kv_hash) return true;
  ViolationRow row = unknown_row(slot, kVerifyRealKvHash, step);
  row.position = record.position;
  row.stored_token = record.token;
  row.stored_chain_hash = static_cast<int64_t>(record.prev_hash);
  pool.report(row);
  return true;
}

void canary_scrub(TensorView launch, TensorView slots, TensorView num_valid, int64_t step) {
  const Pool pool = pool_of(launch);
  const int64_t* listed = int64_vector(slots, "slots", kHost);
  const int64_t valid = *int32_scalar(num_valid, "num_valid", kHost);

  const int64_t entries = pool.folds_real_kv() ? std::min(valid, slots.numel()) : 0;
  int64_t compared = 0;
  for (int64_t entry = 0; entry < entries; ++entry) {
    compared += scrub_slot(pool, listed[entry], step);
  }
  pool.count_launch(compared);
}

void canary_scrub_range(TensorView launch, TensorView records, int64_t first_slot,
                        int64_t num_slots, int64_t step) {
  const Pool pool = pool_of(launch);
  check_records(records, pool.context());
  check_at_least(first_slot, "first_slot", 0);
  check_at_least(num_slots, "num_slots", 0);

  const int64_t pool_size = pool.context().num_slots;
  const int64_t begin = std::min(first_slot, pool_size);
  const int64_t end = pool.folds_real_kv() ? begin + std::min(num_slots, pool_size - begin) : begin;
  int64_t compared = 0;
  for (int64_t slot = begin; slot < end; ++slot) compared += scrub_slot(pool, slot, step);
  pool.count_launch(compared);
}

SnapshotTensors snapshot_of(const TensorView& entries, const TensorView& rows,
                            const TensorView& table_rows, const TensorView& prefix_lens,
                            int64_t num_requests) {
  const char* const like = "request_rows";
  const SnapshotTensors snapshot{integer_matrix(entries, "snapshot.entries", kHost),
                                 int64_vector(rows, "snapshot.rows", kHost),
                                 int64_vector(table_rows, "snapshot.table_rows", kHost),
                                 int64_vector(prefix_lens, "snapshot.prefix_lens", kHost)};
  check_size("snapshot.rows", rows.numel(), num_requests, like);
  check_size("snapshot.table_rows", table_rows.numel(), num_requests, like);
  check_size("snapshot.prefix_lens", prefix_lens.numel(), num_requests, like);
  return snapshot;
}

void canary_snapshot_table(TensorView page_table, int64_t page_size, int64_t padding_row,
                           TensorView request_rows, TensorView prefix_lens,
                           Optional<TensorView> full_to_swa, int64_t swa_window_size,
                           int64_t first_request, TensorView entries, TensorView rows,
                           TensorView table_rows, TensorView snapshot_lens) {
  const int64_t num_requests = request_rows.numel();
  const SnapshotArguments arguments{
      page_table_of(page_table, "page_table", page_size, full_to_swa, swa_window_size),
      padding_row,
      integers(request_rows, "request_rows", kHost),
      integers(prefix_lens, "prefix_lens", kHost, num_requests, "request_rows"),
      first_request,
      snapshot_of(entries, rows, table_rows, snapshot_lens, num_requests)};
  check_at_least(first_request, "first_request", 0);

  take_snapshot(arguments);
}

void canary_compare_tables(TensorView launch, TensorView page_table, int64_t page_size,
                           Optional<TensorView> full_to_swa, int64_t swa_window_size,
                           TensorView request_uids, TensorView entries, TensorView rows,
                           TensorView table_rows, TensorView snapshot_lens, int64_t step) {
  const Pool pool = pool_of(launch);
  const int64_t num_requests = request_uids.numel();
  const CompareArguments arguments{
      page_table_of(page_table, "page_table", page_size, full_to_swa, swa_window_size),
      int64_vector(request_uids, "request_uids", kHost),
      num_requests,
      snapshot_of(entries, rows, table_rows, snapshot_lens, num_requests),
      step};

  compare_tables(pool, arguments);
  pool.count_launch(0);
}

void canary_translate(TensorView out_cache_loc, TensorView full_to_swa, TensorView output) {
  const IntArray slots =
      integers(out_cache_loc, "out_cache_loc", kHost, output.numel(), "output");
  const IntArray lookup = integers(full_to_swa, "full_to_swa_index_mapping", kHost);
  const IntArray out = integers(output, "output", kHost);

  for (int64_t index = 0; index < slots.size; ++index) {
    const int64_t slot = slots[index];
    int64_t value = slot >= 0 && slot < lookup.size ? lookup[slot] : kUnknown;
    if (value <= kPaddingSlot) value = kUnknown;
    if (out.is_int64) {
      static_cast<int64_t*>(output.data_ptr())[index] = value;
    } else {
      static_cast<int32_t*>(output.data_ptr())[index] = static_cast<int32_t>(value);
    }
  }
}

// Copies the arrays to output[start], ...; returns where the next one would start.
int64_t canary_concatenate(TensorView output, int64_t start, TensorView first,
                           Optional<TensorView> second, Optional<TensorView> third,
                           Optional<TensorView> fourth, Optional<TensorView> fifth,
                           Optional<TensorView> sixth, Optional<TensorView> seventh,
                           Optional<TensorView> eighth, Optional<TensorView> ninth,
                           Optional<TensorView> tenth) {
  int64_t* const out = int64_vector(output, "output", kHost);
  int64_t end = start;
  for (const Optional<TensorView>& given :
       {Optional<TensorView>(first), second, third, fourth, fifth, sixth, seventh, eighth, ninth,
        tenth}) {
    const IntArray array = optional_integers(given, "arrays", kHost);
    check_room("output", output.numel(), end + array.size);
    for (int64_t index = 0; index < array.size; ++index) out[end + index] = array[index];
    end += array.size;
  }
  return end;
}

int64_t canary_chain_hash(TensorView tokens, int64_t identity_key, int64_t start_position,
                          int64_t previous, bool has_previous) {
  const IntArray sequence = integers(tokens, "tokens", kHost);

  uint64_t running = has_previous ? static_cast<uint64_t>(previous)
                                  : chain_start(static_cast<uint64_t>(identity_key));
  for (int64_t index = 0; index < sequence.size; ++index) {
    running = splitmix64_mix3(running, static_cast<uint64_t>(sequence[index]),
                              static_cast<uint64_t>(start_position) + static_cast<uint64_t>(index));
  }
  return static_cast<int64_t>(running);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_write, canary_write);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_verify_plan, canary_verify_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_verify_table, canary_verify_table);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_plan, canary_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_prepare, canary_prepare);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_seal, canary_seal);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_scrub, canary_scrub);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_scrub_range, canary_scrub_range);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_snapshot_table, canary_snapshot_table);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_compare_tables, canary_compare_tables);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_translate, canary_translate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_concatenate, canary_concatenate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_chain_hash, canary_chain_hash);

}  // namespace kvcanary
