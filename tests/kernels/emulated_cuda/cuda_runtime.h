// Just enough of CUDA to run this project's kernels on a CPU, so that their logic is tested where
// there is no GPU: every thread of a block is a fiber, blocks run one after the other. It shows
// wrong results and missing barriers' deadlocks; it shows no data races and no timing.
//
// Collectives must be called by all threads of a warp (mask 0xFFFFFFFF) or of a block.
#pragma once

#include <ucontext.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated_cuda {

constexpr unsigned kLanes = 32;
constexpr size_t kStackBytes = 256 * 1024;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned thread = 0;
  uint64_t warp_calls = 0;   // collectives of the warp that this thread has entered
  uint64_t block_calls = 0;  // the same of the block
  bool done = false;
};

struct Exchange {
  uint64_t values[2][kLanes];  // of the current and of the previous collective
};

inline std::vector<Fiber> fibers;
inline std::vector<Exchange> exchanges;
inline unsigned running_threads = 0;
inline Fiber* current = nullptr;
inline ucontext_t scheduler;
inline std::function<void()> body;

inline void yield() { swapcontext(&current->context, &scheduler); }

inline void run_fiber() {
  body();
  current->done = true;
  yield();
}

template <typename Behind>
void wait_for(unsigned begin, unsigned end, Behind behind) {
  yield();  // the last to arrive is not the first to go on: lanes always run from 31 down to 0
  for (unsigned other = begin; other < end; ++other) {
    while (!fibers[other].done && behind(fibers[other])) yield();
  }
}

inline void sync_warp() {
  const uint64_t mine = ++current->warp_calls;
  const unsigned begin = current->thread / kLanes * kLanes;
  wait_for(begin, begin + kLanes, [mine](const Fiber& f) { return f.warp_calls < mine; });
}

inline void sync_block() {
  const uint64_t mine = ++current->block_calls;
  wait_for(0, running_threads, [mine](const Fiber& f) { return f.block_calls < mine; });
}

// Every lane gives a value; returns what all lanes of the warp gave.
inline const uint64_t* exchange(uint64_t value) {
  Exchange& all = exchanges[current->thread / kLanes];
  uint64_t* values = all.values[(current->warp_calls + 1) % 2];
  values[current->thread % kLanes] = value;
  sync_warp();
  return values;
}

inline void run_block(unsigned threads) {
  if (threads % kLanes != 0) abort();
  if (fibers.size() < threads) {
    fibers.resize(threads);
    exchanges.resize(threads / kLanes);
  }
  running_threads = threads;
  for (unsigned thread = 0; thread < threads; ++thread) {
    Fiber& fiber = fibers[thread];
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    fiber.thread = thread;
    fiber.warp_calls = fiber.block_calls = 0;
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
  for (unsigned left = threads; left != 0;) {
    left = 0;
    // Upper lanes first: whoever relies on lanes storing in order finds out.
    for (unsigned thread = threads; thread-- > 0;) {
      if (fibers[thread].done) continue;
      current = &fibers[thread];
      threadIdx = dim3(thread, 0, 0);
      swapcontext(&scheduler, &current->context);
      left += !fibers[thread].done;
    }
  }
}

template <typename T>
uint64_t to_bits(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace emulated_cuda

// ---- what kernels call -------------------------------------------------------------------------

inline void __syncwarp(unsigned = 0xFFFFFFFFu) { emulated_cuda::sync_warp(); }
inline void __syncthreads() { emulated_cuda::sync_block(); }
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emulated_cuda::yield(); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulated_cuda::from_bits<T>(
      emulated_cuda::exchange(emulated_cuda::to_bits(value))[static_cast<unsigned>(lane) % 32]);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ bits);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}

inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint64_t* votes = emulated_cuda::exchange(vote ? 1 : 0);
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane) result |= static_cast<unsigned>(votes[lane]) << lane;
  return result;
}

inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, !vote) == 0; }

template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  const uint64_t mine = emulated_cuda::to_bits(value);
  const uint64_t* values = emulated_cuda::exchange(mine);
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane) result |= (values[lane] == mine ? 1u : 0u) << lane;
  return result;
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }

template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address += value;
  return old;
}

template <typename T>
T atomicAnd(T* address, T value) {
  const T old = *address;
  *address &= value;
  return old;
}

template <typename T>
T atomicExch(T* address, T value) {
  const T old = *address;
  *address = value;
  return old;
}

template <typename T>
T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}

// ---- what the bindings call --------------------------------------------------------------------

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

inline const char* cudaGetErrorName(cudaError_t) { return "emulated"; }
inline const char* cudaGetErrorString(cudaError_t) { return "emulated"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = -1;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 2;
  return cudaSuccess;
}

// Everything launched is done when the launch returns. Events know who recorded them, so that a
// stream that waits for another thread's place on the caller's stream is an error.
constexpr cudaError_t cudaErrorOfAnotherThread = 1;
struct EmulatedEvent {
  bool marks_callers_stream = false;
  std::thread::id recorded_by;
};
using cudaEvent_t = EmulatedEvent*;
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2;
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new char;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new EmulatedEvent;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *event = {stream == nullptr, std::this_thread::get_id()};
  std::this_thread::sleep_for(std::chrono::microseconds(20));  // other threads have their turn
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t event, unsigned) {
  const bool own = event->recorded_by == std::this_thread::get_id();
  return event->marks_callers_stream && !own ? cudaErrorOfAnotherThread : cudaSuccess;
}

// Nothing is captured; the mode is only kept, for each thread.
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static thread_local cudaStreamCaptureMode of_thread = cudaStreamCaptureModeGlobal;
  const cudaStreamCaptureMode before = of_thread;
  of_thread = *mode;
  *mode = before;
  return cudaSuccess;
}

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> launching(one_at_a_time);
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  emulated_cuda::body = [&] { kernel(arguments...); };
  for (unsigned y = 0; y < config->gridDim.y; ++y) {
    for (unsigned x = 0; x < config->gridDim.x; ++x) {
      blockIdx = dim3(x, y, 0);
      emulated_cuda::run_block(config->blockDim.x);
    }
  }
  return cudaSuccess;
}
