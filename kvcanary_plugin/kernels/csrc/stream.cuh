// Bytes on their way into shared memory, for a warp that folds many strips one after the other. The
// copy engine of compute capability 9.0 moves them: what is on its way takes no registers, so that
// a warp has several strips in flight while it folds one.
#pragma once

#include "device.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KVCANARY_STREAMS_STRIPS 1
#else
#define KVCANARY_STREAMS_STRIPS 0
#endif

namespace kvcanary {

constexpr int kStageBytes = 2048;
constexpr int kStages = 4;

// A warp's shared memory.
struct alignas(128) StreamStages {
  WordPair words[kStages][kStageBytes / sizeof(WordPair)];
  uint64_t arrived[kStages];  // barriers
};

#if KVCANARY_STREAMS_STRIPS

// A queue of pieces of up to kStageBytes: asked for in order, awaited in order. All functions are
// called by the whole warp.
class StripStream {
 public:
  // `stages` is null in a launch that streams nothing.
  __device__ __forceinline__ explicit StripStream(StreamStages* stages) : stages_(stages) {
    if (stages == nullptr) return;
    if (lane_index() == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier(stage)) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool has_room() const { return asked_ - taken_ < kStages; }

  // `address` and `bytes` are multiples of 16.
  __device__ __forceinline__ void ask(int64_t address, int bytes) {
    const int stage = static_cast<int>(asked_ % kStages);
    if (lane_index() == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier(stage)),
                   "r"(bytes)
                   : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
          ::"r"(shared_address(stages_->words[stage])),
          "l"(address), "r"(bytes), "r"(barrier(stage))
          : "memory");
    }
    ++asked_;
  }

  // The oldest piece that was asked for and not released.
  __device__ __forceinline__ const WordPair* await() const {
    const int stage = static_cast<int>(taken_ % kStages);
    const unsigned parity = taken_ / kStages & 1;
    unsigned arrived = 0;
    while (arrived == 0) {
      asm volatile(
          "{\n"
          ".reg .pred done;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n"
          "}\n"
          : "=r"(arrived)
          : "r"(barrier(stage)), "r"(parity)
          : "memory");
    }
    return stages_->words[stage];
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    ++taken_;
  }

 private:
  static __device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
  }

  __device__ __forceinline__ unsigned barrier(int stage) const {
    return shared_address(&stages_->arrived[stage]);
  }

  StreamStages* stages_;
  unsigned asked_ = 0;
  unsigned taken_ = 0;
};

#else

class StripStream {
 public:
  __device__ __forceinline__ explicit StripStream(StreamStages*) {}
};

#endif

}  // namespace kvcanary
