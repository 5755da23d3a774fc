// The raw functions on a GPU. Each reads as three acts: check the arguments, enter the device and
// its stream, launch. A launch never synchronises, allocates or copies, so all of them may be
// captured into a CUDA graph.
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "checks.h"
#include "concatenate.cuh"
#include "device.cuh"
#include "plan.cuh"
#include "scrub.cuh"
#include "snapshot.cuh"
#include "verify.cuh"
#include "write.cuh"

namespace kvcanary {
namespace {

// ---- the device --------------------------------------------------------------------------------

constexpr int kMostDevices = 128;

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here, so nobody else should trip over it
  TVM_FFI_THROW(RuntimeError) << "kvcanary: " << what << " failed: " << cudaGetErrorName(error)
                              << " (" << cudaGetErrorString(error) << ")";
}

// A second stream of a device, for launches that run beside what its current stream holds. Made
// when first asked for, and never destroyed. Several engines of a process, each with a thread of its
// own, share it: one at a time records its events.
struct Branch {
  cudaStream_t stream = nullptr;
  cudaEvent_t begins = nullptr, ends = nullptr;
  std::mutex in_use;

  static Branch& of(int device_id) {
    static Branch branches[kMostDevices];
    return branches[std::clamp(device_id, 0, kMostDevices - 1)];
  }

  // In use, and with its device current.
  void make() {
    if (ends != nullptr) return;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
    check_cuda(cudaEventCreateWithFlags(&begins, cudaEventDisableTiming), "an event");
    check_cuda(cudaEventCreateWithFlags(&ends, cudaEventDisableTiming), "an event");
  }
};

// Makes `device` current for its lifetime; work goes to the stream that tvm-ffi names for it.
class OnDevice {
 public:
  explicit OnDevice(DLDevice device) : device_(device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device_.device_id) {
      check_cuda(cudaSetDevice(device_.device_id), "cudaSetDevice");
    }
    stream_ = static_cast<cudaStream_t>(
        TVMFFIEnvGetStream(static_cast<int32_t>(kDLCUDA), device_.device_id));
  }
  ~OnDevice() {
    if (previous_ != device_.device_id) cudaSetDevice(previous_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  template <typename... Parameters, typename... Arguments>
  void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads,
              const Arguments&... arguments) const {
    check_cuda(launch_kernel(kernel, grid, threads, stream_, arguments...), name);
  }

  // What is launched from here on follows what the stream holds, and nothing waits for it.
  void branch_off() {
    Branch& branch = use_branch();
    check_cuda(cudaEventRecord(branch.begins, stream_), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(branch.stream, branch.begins, 0), "cudaStreamWaitEvent");
    stream_ = branch.stream;
  }

  // The end of what was launched since.
  void end_branch() const {
    check_cuda(cudaEventRecord(Branch::of(device_.device_id).ends, stream_), "cudaEventRecord");
  }

  // The stream goes on when everything on the branch is done.
  void join_branch() {
    check_cuda(cudaStreamWaitEvent(stream_, use_branch().ends, 0), "cudaStreamWaitEvent");
  }

  int multiprocessors() const {
    static int counts[kMostDevices] = {};  // a race would write the same value twice
    const int slot = std::clamp(device_.device_id, 0, kMostDevices - 1);
    if (counts[slot] == 0) {
      int count = 0;
      check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_.device_id),
                 "cudaDeviceGetAttribute");
      counts[slot] = count;
    }
    return counts[slot];
  }

 private:
  // Until the end of this object, for this thread alone.
  Branch& use_branch() {
    Branch& branch = Branch::of(device_.device_id);
    branch_in_use_ = std::unique_lock<std::mutex>(branch.in_use);
    branch.make();
    return branch;
  }

  DLDevice device_;
  int previous_ = 0;
  cudaStream_t stream_ = nullptr;
  std::unique_lock<std::mutex> branch_in_use_;
};

// ---- grids -------------------------------------------------------------------------------------

constexpr int64_t kMostBlocksY = 65535;
// Above this many blocks, starting them costs more than letting each of them do several tiles.
constexpr int64_t kEnoughBlocks = 16384;

unsigned blocks(int64_t wanted, int64_t most) {
  return static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1)));
}

// y over requests, x over pieces of `per_block` of up to `most_each` things per request.
dim3 request_grid(int64_t num_requests, int64_t most_each, int64_t per_block) {
  const unsigned y = blocks(num_requests, kMostBlocksY);
  return dim3(blocks(divide_up(most_each, per_block), kEnoughBlocks / y), y);
}

// One fold per entry: few of them take larger blocks, one for each as long as all run at once.
template <typename Job>
void launch_folds(const OnDevice& device, const char* name, int64_t num_entries,
                  const LaunchContext& context, const Job& job) {
  const int64_t multiprocessors = device.multiprocessors();
  const auto launch = [&](auto kernel, int warps_log2) {
    const int64_t most = multiprocessors * (kFoldWarpsPerMultiprocessor >> warps_log2);
    device.launch(name, kernel, dim3(blocks(num_entries, most)), kWarpSize << warps_log2, context,
                  job);
  };
  if (num_entries <= multiprocessors) {
    launch(fold_kernel<Job, kMostFoldWarpsLog2>, kMostFoldWarpsLog2);
  } else if (num_entries <= 2 * multiprocessors) {
    launch(fold_kernel<Job, kMostFoldWarpsLog2 - 1>, kMostFoldWarpsLog2 - 1);
  } else {
    launch(fold_kernel<Job, kFoldWarpsLog2>, kFoldWarpsLog2);
  }
}

// ---- checks ------------------------------------------------------------------------------------

// Kernels hold slots and counts of entries in 32 bits where that saves time; addresses never.
void check_32_bits(int64_t value, const char* name) {
  KVCANARY_CHECK(value <= INT32_MAX) << name << " must be at most " << INT32_MAX << ", got "
                                     << value;
}

LaunchContext checked_launch(const TensorView& launch) {
  const LaunchContext context = read_launch(launch);
  check_32_bits(context.num_slots, "canary_buf rows");
  check_32_bits(context.num_sources, "real_kv_sources");
  return context;
}

int64_t checked_plan_capacity(const TensorView& write_offsets, const TensorView& seed_slots) {
  const int64_t capacity = seed_slots.numel();
  check_at_least(capacity, "plan.write_seed_slot_indices size", 1);
  check_size("plan.write_offsets", write_offsets.numel(), capacity + 1, "the seeds and one more");
  return capacity;
}

WritePlanOut write_plan_out(const TensorView& write_offsets, const TensorView& seed_slots,
                            const TensorView& num_valid_reqs, DLDevice device,
                            int64_t num_requests) {
  const int64_t capacity = checked_plan_capacity(write_offsets, seed_slots);
  KVCANARY_CHECK(num_requests <= capacity)
      << "a batch of " << num_requests << " requests does not fit into a write plan for "
      << capacity;
  return {int64_vector(write_offsets, "plan.write_offsets", device),
          int64_vector(seed_slots, "plan.write_seed_slot_indices", device),
          int32_scalar(num_valid_reqs, "plan.write_num_valid_reqs", device)};
}

PlannedSlots planned_slots(const TensorView& write_offsets, const TensorView& num_valid_reqs,
                           const TensorView& out_cache_loc, DLDevice device) {
  check_at_least(write_offsets.numel(), "plan.write_offsets size", 2);
  check_32_bits(out_cache_loc.numel(), "out_cache_loc size");
  return {int64_vector(write_offsets, "plan.write_offsets", device),
          int32_scalar(num_valid_reqs, "plan.write_num_valid_reqs", device),
          write_offsets.numel() - 1, integers(out_cache_loc, "out_cache_loc", device)};
}

PageTable page_table_of(const TensorView& page_table, const char* name, DLDevice device,
                        int64_t page_size, const Optional<TensorView>& full_to_swa,
                        int64_t swa_window_size) {
  check_at_least(page_size, "page_size", 1);
  check_at_least(swa_window_size, "swa_window_size", 0);
  if (full_to_swa.has_value()) {
    check_at_least(full_to_swa.value().numel(), "full_to_swa_index_mapping size", 1);
    check_32_bits(full_to_swa.value().numel(), "full_to_swa_index_mapping size");
  }
  return {integer_matrix(page_table, name, device), page_size,
          optional_integers(full_to_swa, "full_to_swa_index_mapping", device), swa_window_size};
}

TokenHistory history_of(const Optional<TensorView>& tokens, const Optional<TensorView>& valid_lens,
                        DLDevice device, int64_t num_requests) {
  check_together(tokens.has_value(), "expected_tokens", valid_lens.has_value(),
                 "expected_valid_lens");
  return {optional_integer_matrix(tokens, "expected_tokens", device),
          optional_integers(valid_lens, "expected_valid_lens", device, num_requests,
                            "request_rows")};
}

Batch batch_of(const TensorView& request_rows, const TensorView& prefix_lens,
               const TensorView& extend_lens, DLDevice device, int64_t padding_row) {
  const int64_t size = request_rows.numel();
  return {integers(request_rows, "request_rows", device),
          integers(prefix_lens, "prefix_lens", device, size, "request_rows"),
          integers(extend_lens, "extend_lens", device, size, "request_rows"), padding_row};
}

// ---- the functions -----------------------------------------------------------------------------

void canary_write(TensorView launch, TensorView write_offsets, TensorView seed_slots,
                  TensorView num_valid_reqs, Optional<TensorView> request_uids,
                  Optional<TensorView> identity_keys, TensorView input_ids, TensorView positions,
                  TensorView out_cache_loc, Optional<TensorView> expected_tokens,
                  Optional<TensorView> expected_positions, int64_t step, bool beside) {
  const LaunchContext context = checked_launch(launch);
  const DLDevice device = launch_device(context);
  const int64_t capacity = checked_plan_capacity(write_offsets, seed_slots);
  const int64_t entries = input_ids.numel();
  const char* const seeds_name = "plan.write_seed_slot_indices";
  check_together(expected_tokens.has_value(), "expected_input_tokens",
                 expected_positions.has_value(), "expected_input_positions");
  const WriteArguments arguments{
      int64_vector(write_offsets, "plan.write_offsets", device),
      int64_vector(seed_slots, seeds_name, device),
      int32_scalar(num_valid_reqs, "plan.write_num_valid_reqs", device),
      optional_int64_vector(request_uids, "plan.write_request_uids", device, capacity, seeds_name),
      optional_int64_vector(identity_keys, "plan.write_identity_keys", device, capacity,
                            seeds_name),
      capacity,
      integers(input_ids, "input_ids", device),
      integers(positions, "positions", device, entries, "input_ids"),
      integers(out_cache_loc, "out_cache_loc", device, entries, "input_ids"),
      optional_integers(expected_tokens, "expected_input_tokens", device, entries, "input_ids"),
      optional_integers(expected_positions, "expected_input_positions", device, entries,
                        "input_ids"),
      step};
  const WriteFoldJob fold{planned_slots(write_offsets, num_valid_reqs, out_cache_loc, device)};

  OnDevice on_device(device);
  if (beside) on_device.branch_off();

  // More blocks than run at once would only wait for their turn: they walk on in strides.
  const int64_t for_singles = single_entry_blocks(capacity);
  const int64_t for_others = std::min<int64_t>(capacity, 2 * on_device.multiprocessors());
  on_device.launch("canary_write", write_kernel, dim3(blocks(for_singles + for_others, INT32_MAX)),
                   kWriteThreads, context, arguments);
  if (context.num_sources > 0 && entries > 0) {
    launch_folds(on_device, "the fold of canary_write", entries, context, fold);
  }
  if (beside) on_device.end_branch();
}

// The current stream of the device that holds `marker` waits for the writes launched beside one.
// A tensor, not a number: tvm-ffi learns the current stream of a device from an argument that lies
// on it, and names the default stream otherwise.
void canary_join_writes(TensorView marker) {
  OnDevice on_device(marker.device());
  on_device.join_branch();
}

// How calls of this thread get on with CUDA graphs that are being captured (a
// cudaStreamCaptureMode); returns what held before.
int64_t canary_exchange_capture_mode(int64_t mode) {
  cudaStreamCaptureMode exchanged = static_cast<cudaStreamCaptureMode>(mode);
  check_cuda(cudaThreadExchangeStreamCaptureMode(&exchanged),
             "cudaThreadExchangeStreamCaptureMode");
  return static_cast<int64_t>(exchanged);
}

void canary_verify_plan(TensorView launch, TensorView slots, TensorView expected_tokens,
                        TensorView expected_positions, TensorView prev_slots, TensorView num_valid,
                        TensorView enable, Optional<TensorView> request_uids,
                        Optional<TensorView> batch_rows, Optional<TensorView> identity_keys,
                        bool check_expected_token, int64_t step) {
  const LaunchContext context = checked_launch(launch);
  const DLDevice device = launch_device(context);
  const char* const slots_name = "plan.verify_slot_indices";
  const int64_t capacity = slots.numel();
  check_at_least(capacity, "plan.verify_slot_indices size", 1);
  const auto column = [&](const Optional<TensorView>& tensor, const char* name) {
    return optional_int64_vector(tensor, name, device, capacity, slots_name);
  };
  const int64_t* const tokens = column(expected_tokens, "plan.verify_expected_tokens");
  const PlanVerifyArguments arguments{
      int64_vector(slots, slots_name, device),
      check_expected_token ? tokens : nullptr,
      column(expected_positions, "plan.verify_expected_positions"),
      column(prev_slots, "plan.verify_prev_slot_indices"),
      column(request_uids, "plan.verify_request_uids"),
      column(batch_rows, "plan.verify_batch_rows"),
      column(identity_keys, "plan.verify_identity_keys"),
      int32_scalar(num_valid, "plan.verify_num_valid", device),
      int32_scalar(enable, "plan.enable", device),
      capacity,
      step};

  const OnDevice on_device(device);

  on_device.launch("canary_verify_plan",
                   context.num_sources > 0 ? verify_plan_kernel<true> : verify_plan_kernel<false>,
                   dim3(blocks(divide_up(capacity, kVerifyThreads), kEnoughBlocks)),
                   kVerifyThreads, context, arguments);
}

void canary_verify_table(TensorView launch, TensorView page_table, int64_t page_size,
                         int64_t padding_row, TensorView request_rows, TensorView request_uids,
                         TensorView prefix_lens, int64_t max_prefix_len,
                         Optional<TensorView> full_to_swa, int64_t swa_window_size,
                         Optional<TensorView> identity_keys, Optional<TensorView> expected_tokens,
                         Optional<TensorView> expected_valid_lens, int64_t token_offset,
                         Optional<TensorView> prefix_hashes, Optional<TensorView> prefix_hash_valid,
                         int64_t step) {
  const LaunchContext context = checked_launch(launch);
  const DLDevice device = launch_device(context);
  const int64_t num_requests = request_rows.numel();
  const char* const like = "request_rows";
  check_at_least(max_prefix_len, "max_prefix_len", 0);
  check_together(prefix_hashes.has_value(), "prefix_hashes", prefix_hash_valid.has_value(),
                 "prefix_hash_valid");
  const TableVerifyArguments arguments{
      page_table_of(page_table, "page_table", device, page_size, full_to_swa, swa_window_size),
      padding_row,
      integers(request_rows, "request_rows", device),
      int64_vector(request_uids, "request_uids", device),
      integers(prefix_lens, "prefix_lens", device, num_requests, like),
      optional_int64_vector(identity_keys, "identity_keys", device, num_requests, like),
      history_of(expected_tokens, expected_valid_lens, device, num_requests),
      token_offset,
      optional_int64_vector(prefix_hashes, "prefix_hashes", device, num_requests, like),
      optional_int32_vector(prefix_hash_valid, "prefix_hash_valid", device, num_requests, like),
      step};
  check_size("request_uids", request_uids.numel(), num_requests, like);
  check_32_bits(arguments.table.positions() + 1, "positions of a page_table row");

  const OnDevice on_device(device);

  const int64_t most_each =
      swa_window_size > 0 ? std::min(max_prefix_len, swa_window_size) : max_prefix_len;
  const bool folds = context.num_sources > 0;
  const int64_t positions_per_block =
      kVerifyWarps * ((folds ? 1 : kVerifyItems) * int64_t{kWarpSize} - 1);
  on_device.launch("canary_verify_table",
                   folds ? verify_table_kernel<1, true> : verify_table_kernel<kVerifyItems, false>,
                   request_grid(num_requests, most_each, positions_per_block), kVerifyThreads,
                   context, arguments);
}

void canary_plan(TensorView verify_slots, TensorView verify_tokens, TensorView verify_positions,
                 TensorView verify_prev_slots, TensorView verify_num_valid, TensorView enable,
                 TensorView write_offsets, TensorView seed_slots, TensorView num_valid_reqs,
                 TensorView request_rows, TensorView prefix_lens, TensorView extend_lens,
                 TensorView page_table, int64_t page_size, int64_t padding_row,
                 int64_t swa_window_size, Optional<TensorView> full_to_swa,
                 Optional<TensorView> expected_tokens, Optional<TensorView> expected_valid_lens,
                 int64_t token_offset) {
  const DLDevice device = page_table.device();
  const int64_t capacity = verify_slots.numel();
  check_32_bits(capacity, "plan.verify_slot_indices size");
  const auto column = [&](const TensorView& tensor, const char* name) {
    int64_t* data = int64_vector(tensor, name, device);
    check_size(name, tensor.numel(), capacity, "plan.verify_slot_indices");
    return data;
  };
  const Batch batch = batch_of(request_rows, prefix_lens, extend_lens, device, padding_row);
  const int64_t num_requests = request_rows.numel();
  const PlanArguments arguments{
      {column(verify_slots, "plan.verify_slot_indices"),
       column(verify_tokens, "plan.verify_expected_tokens"),
       column(verify_positions, "plan.verify_expected_positions"),
       column(verify_prev_slots, "plan.verify_prev_slot_indices"),
       int32_scalar(verify_num_valid, "plan.verify_num_valid", device),
       int32_scalar(enable, "plan.enable", device), capacity},
      write_plan_out(write_offsets, seed_slots, num_valid_reqs, device, num_requests),
      page_table_of(page_table, "req_to_token", device, page_size, full_to_swa, swa_window_size),
      batch,
      history_of(expected_tokens, expected_valid_lens, device, num_requests),
      token_offset};

  const OnDevice on_device(device);

  // The plan's capacity is all that the host knows about the number of entries.
  constexpr int64_t kPositionsPerThread = 4;
  const int64_t most_each = divide_up(capacity, std::max<int64_t>(num_requests, 1));
  on_device.launch("canary_plan", plan_kernel,
                   request_grid(num_requests, most_each, kPositionsPerThread * kPlanThreads),
                   kPlanThreads, arguments);
}

// The first events of the list, as many as one launch takes; they leave the list.
EventArguments take_events(EventList& happened, int64_t step) {
  EventArguments arguments{};
  arguments.count = std::min<int64_t>(happened.count, kEventsPerLaunch);
  arguments.step = step;
  std::copy_n(happened.rows, arguments.count, arguments.events);
  happened.rows += arguments.count;
  happened.count -= arguments.count;
  return arguments;
}

void canary_prepare(TensorView launch, TensorView write_offsets, TensorView seed_slots,
                    TensorView num_valid_reqs, Optional<TensorView> plan_uids,
                    Optional<TensorView> plan_keys, TensorView page_table, int64_t page_size,
                    int64_t padding_row, TensorView request_rows, TensorView request_uids,
                    TensorView prefix_lens, TensorView extend_lens,
                    Optional<TensorView> full_to_swa, Optional<TensorView> identity_keys,
                    TensorView out_cache_loc, Optional<TensorView> events, int64_t step) {
  const LaunchContext context = checked_launch(launch);
  const DLDevice device = launch_device(context);
  const Batch batch = batch_of(request_rows, prefix_lens, extend_lens, device, padding_row);
  const int64_t num_requests = request_rows.numel(), capacity = seed_slots.numel();
  const char* const seeds_name = "plan.write_seed_slot_indices";
  PrepareArguments arguments{
      write_plan_out(write_offsets, seed_slots, num_valid_reqs, device, num_requests),
      optional_int64_vector(plan_uids, "plan.write_request_uids", device, capacity, seeds_name),
      optional_int64_vector(plan_keys, "plan.write_identity_keys", device, capacity, seeds_name),
      page_table_of(page_table, "page_table", device, page_size, full_to_swa, 0),
      batch,
      int64_vector(request_uids, "request_uids", device),
      optional_int64_vector(identity_keys, "identity_keys", device, num_requests, "request_rows"),
      integers(out_cache_loc, "out_cache_loc", device),
      step,
      {}};
  check_size("request_uids", request_uids.numel(), num_requests, "request_rows");
  EventList happened = event_list(events);

  const OnDevice on_device(device);

  while (happened.count > kEventsPerLaunch) {
    on_device.launch("canary_events", events_kernel, dim3(1), kPlanThreads, context,
                     take_events(happened, step));
  }
  arguments.happened = take_events(happened, step);
  const bool has_events = arguments.happened.count > 0;
  const int64_t threads = has_events ? num_requests : std::max(out_cache_loc.numel(), num_requests);
  const int64_t grid = std::min<int64_t>(divide_up(std::max<int64_t>(threads, 1), kPlanThreads),
                                         on_device.multiprocessors());
  on_device.launch("canary_prepare", prepare_kernel,
                   dim3(blocks(grid + (has_events ? 1 : 0), INT32_MAX)), kPlanThreads, context,
                   arguments);
}

void canary_seal(TensorView launch, TensorView write_offsets, TensorView num_valid_reqs,
                 TensorView out_cache_loc, int64_t /*step*/) {
  const LaunchContext context = checked_launch(launch);
  const DLDevice device = launch_device(context);
  const SealJob job{planned_slots(write_offsets, num_valid_reqs, out_cache_loc, device)};

  const OnDevice on_device(device);

  launch_folds(on_device, "canary_seal", out_cache_loc.numel(), context, job);
}

void canary_scrub(TensorView launch, TensorView slots, TensorView num_valid, int64_t step) {
  const LaunchContext context = checked_launch(launch);
  const DLDevice device = launch_device(context);
  check_32_bits(slots.numel(), "slots size");
  const ScrubJob job{int64_vector(slots, "slots", device),
                     int32_scalar(num_valid, "num_valid", device), slots.numel(), {step}};

  const OnDevice on_device(device);

  launch_folds(on_device, "canary_scrub", slots.numel(), context, job);
}

void canary_scrub_range(TensorView launch, TensorView records, int64_t first_slot,
                        int64_t num_slots, int64_t step) {
  const LaunchContext context = checked_launch(launch);
  const DLDevice device = launch_device(context);
  check_records(records, context);
  check_at_least(first_slot, "first_slot", 0);
  check_at_least(num_slots, "num_slots", 0);
  const int64_t first = std::min(first_slot, context.num_slots);
  const int64_t covered = std::min(num_slots, context.num_slots - first);
  const ScrubRangeJob job{first, static_cast<int>(covered), {step}};

  const OnDevice on_device(device);

  launch_folds(on_device, "canary_scrub_range", covered, context, job);
}

SnapshotTensors snapshot_of(const TensorView& entries, const TensorView& rows,
                            const TensorView& table_rows, const TensorView& prefix_lens,
                            DLDevice device, int64_t num_requests) {
  const char* const like = "request_rows";
  const SnapshotTensors snapshot{integer_matrix(entries, "snapshot.entries", device),
                                 int64_vector(rows, "snapshot.rows", device),
                                 int64_vector(table_rows, "snapshot.table_rows", device),
                                 int64_vector(prefix_lens, "snapshot.prefix_lens", device)};
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
  const DLDevice device = page_table.device();
  const int64_t num_requests = request_rows.numel();
  const SnapshotArguments arguments{
      page_table_of(page_table, "page_table", device, page_size, full_to_swa, swa_window_size),
      padding_row,
      integers(request_rows, "request_rows", device),
      integers(prefix_lens, "prefix_lens", device, num_requests, "request_rows"),
      first_request,
      snapshot_of(entries, rows, table_rows, snapshot_lens, device, num_requests)};
  check_at_least(first_request, "first_request", 0);
  if (num_requests == 0) return;

  const OnDevice on_device(device);

  constexpr int64_t kEntriesPerThread = 4;
  on_device.launch("canary_snapshot_table", snapshot_kernel,
                   request_grid(num_requests, arguments.snapshot.entries.width,
                                kEntriesPerThread * kSnapshotThreads),
                   kSnapshotThreads, arguments);
}

void canary_compare_tables(TensorView launch, TensorView page_table, int64_t page_size,
                           Optional<TensorView> full_to_swa, int64_t swa_window_size,
                           TensorView request_uids, TensorView entries, TensorView rows,
                           TensorView table_rows, TensorView snapshot_lens, int64_t step) {
  const LaunchContext context = checked_launch(launch);
  const DLDevice device = launch_device(context);
  const int64_t num_requests = request_uids.numel();
  const CompareArguments arguments{
      page_table_of(page_table, "page_table", device, page_size, full_to_swa, swa_window_size),
      int64_vector(request_uids, "request_uids", device),
      num_requests,
      snapshot_of(entries, rows, table_rows, snapshot_lens, device, num_requests),
      step};

  const OnDevice on_device(device);

  on_device.launch("canary_compare_tables", compare_tables_kernel,
                   dim3(blocks(num_requests, INT32_MAX)), kCompareThreads, context, arguments);
}

void canary_translate(TensorView out_cache_loc, TensorView full_to_swa, TensorView output) {
  const DLDevice device = output.device();
  const IntArray out = integers(output, "output", device);
  const TranslateArguments arguments{
      integers(out_cache_loc, "out_cache_loc", device, out.size, "output"),
      integers(full_to_swa, "full_to_swa_index_mapping", device), output.data_ptr(),
      out.is_int64};
  if (out.size == 0) return;

  const OnDevice on_device(device);

  on_device.launch("canary_translate", translate_kernel,
                   dim3(blocks(divide_up(out.size, kPlanThreads), INT32_MAX)), kPlanThreads,
                   arguments);
}

// Copies the arrays to output[start], ...; returns where the next one would start.
int64_t canary_concatenate(TensorView output, int64_t start, TensorView first,
                           Optional<TensorView> second, Optional<TensorView> third,
                           Optional<TensorView> fourth, Optional<TensorView> fifth,
                           Optional<TensorView> sixth, Optional<TensorView> seventh,
                           Optional<TensorView> eighth, Optional<TensorView> ninth,
                           Optional<TensorView> tenth) {
  const DLDevice device = output.device();
  const Optional<TensorView> given[kArraysPerLaunch] = {first, second,  third,  fourth, fifth,
                                                        sixth, seventh, eighth, ninth,  tenth};
  ConcatenateArguments arguments{};
  arguments.output = int64_vector(output, "output", device);
  arguments.starts[0] = start;
  for (int index = 0; index < kArraysPerLaunch; ++index) {
    arguments.arrays[index] = optional_integers(given[index], "arrays", device);
    arguments.starts[index + 1] = arguments.starts[index] + arguments.arrays[index].size;
  }
  const int64_t end = arguments.starts[kArraysPerLaunch];
  check_room("output", output.numel(), end);
  if (end == start) return end;

  const OnDevice on_device(device);

  const int64_t most = int64_t{8} * on_device.multiprocessors();
  on_device.launch("canary_concatenate", concatenate_kernel,
                   dim3(blocks(divide_up(end - start, kConcatenateThreads), most)),
                   kConcatenateThreads, arguments);
  return end;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_write, canary_write);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_join_writes, canary_join_writes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(canary_exchange_capture_mode, canary_exchange_capture_mode);
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

}  // namespace kvcanary
