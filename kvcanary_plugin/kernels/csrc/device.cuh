// What every CUDA kernel here builds on: the warp, 16-byte memory accesses, launching.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "hash.h"
#include "record.h"

namespace kvcanary {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarpSize; }

__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarpSize; }

// 16 bytes of memory as two little-endian words.
struct alignas(16) WordPair {
  uint64_t low;
  uint64_t high;
};

// Real K/V bytes are read once: keep them out of L1, where page table and source rows live.
__device__ __forceinline__ WordPair load_streaming(const WordPair* address) {
#if defined(__CUDA_ARCH__)
  WordPair value;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.low), "=l"(value.high)
               : "l"(address));
  return value;
#else
  return *address;
#endif
}

__device__ __forceinline__ uint64_t load_streaming(const uint64_t* address) {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("ld.global.nc.L1::no_allocate.u64 %0, [%1];" : "=l"(value) : "l"(address));
  return value;
#else
  return *address;
#endif
}

__device__ __forceinline__ uint32_t load_streaming(const uint32_t* address) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
#else
  return *address;
#endif
}

__device__ __forceinline__ WordPair load_pair(const WordPair* address) {
#if defined(__CUDA_ARCH__)
  WordPair value;
  asm volatile("ld.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.low), "=l"(value.high)
               : "l"(address)
               : "memory");
  return value;
#else
  return *address;
#endif
}

// Loads that stay where they stand in the program. A kernel of a few microseconds is a chain of
// waits for memory: what does not depend on each other is to be asked for together, even where a
// branch later on does not want it.
__device__ __forceinline__ int64_t load_now(const int64_t* address) {
#if defined(__CUDA_ARCH__)
  int64_t value;
  asm volatile("ld.volatile.global.s64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
#else
  return *address;
#endif
}

__device__ __forceinline__ int32_t load_now(const int32_t* address) {
#if defined(__CUDA_ARCH__)
  int32_t value;
  asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
#else
  return *address;
#endif
}

__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullWarp, value, offset);
  }
  return value;
}

// The sum over the block, in every thread. `scratch` holds one value a warp. Called by every
// thread.
__device__ __forceinline__ uint64_t block_sum(uint64_t value, uint64_t* scratch) {
  value = warp_sum(value);
  __syncthreads();
  if (lane_index() == 0) scratch[warp_index()] = value;
  __syncthreads();
  uint64_t total = 0;
  for (int warp = 0; warp * kWarpSize < static_cast<int>(blockDim.x); ++warp) {
    total += scratch[warp];
  }
  return total;
}

KVCANARY_HD constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Launches on `stream`; the error, if any, is for the caller to report. Nothing is waited for.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), dim3 grid, int threads,
                          cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace kvcanary
