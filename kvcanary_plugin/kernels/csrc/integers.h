// Views of integer tensors that may be int32 or int64, as the engines hand them over. Reading one
// converts on the fly, so no conversion launch is ever needed. No framework in here.
#pragma once

#include <cstdint>

#include "hash.h"  // KVCANARY_HD

namespace kvcanary {

// A 1-D contiguous tensor; an absent optional tensor has data == nullptr and size == 0.
struct IntArray {
  const void* data = nullptr;
  int64_t size = 0;
  bool is_int64 = false;

  KVCANARY_HD bool present() const { return data != nullptr; }

  KVCANARY_HD int64_t operator[](int64_t index) const {
    return is_int64 ? static_cast<const int64_t*>(data)[index]
                    : static_cast<int64_t>(static_cast<const int32_t*>(data)[index]);
  }
};

// A 2-D tensor whose rows are contiguous and stepped by row_stride (in elements).
struct IntMatrix {
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t row_stride = 0;
  bool is_int64 = false;

  KVCANARY_HD bool present() const { return data != nullptr; }

  KVCANARY_HD int64_t at(int64_t row, int64_t column) const {
    const int64_t index = row * row_stride + column;
    return is_int64 ? static_cast<const int64_t*>(data)[index]
                    : static_cast<int64_t>(static_cast<const int32_t*>(data)[index]);
  }
};

}  // namespace kvcanary
