// Integer arrays behind one another in one buffer: what the flight recorder keeps of a forward.
#pragma once

#include "device.cuh"
#include "integers.h"

namespace kvcanary {

constexpr int kConcatenateThreads = 128;
constexpr int kArraysPerLaunch = 10;

struct ConcatenateArguments {
  IntArray arrays[kArraysPerLaunch];
  int64_t starts[kArraysPerLaunch + 1];  // in the output
  int64_t* output;
};

__global__ void __launch_bounds__(kConcatenateThreads)
    concatenate_kernel(const __grid_constant__ ConcatenateArguments arguments) {
  const int64_t end = arguments.starts[kArraysPerLaunch];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kConcatenateThreads;
  for (int64_t at = arguments.starts[0] +
                    static_cast<int64_t>(blockIdx.x) * kConcatenateThreads + threadIdx.x;
       at < end; at += stride) {
#pragma unroll
    for (int array = 0; array < kArraysPerLaunch; ++array) {
      if (at >= arguments.starts[array] && at < arguments.starts[array + 1]) {
        arguments.output[at] = arguments.arrays[array][at - arguments.starts[array]];
      }
    }
  }
}

}  // namespace kvcanary
