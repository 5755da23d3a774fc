// Argument checks of the raw functions, for the CPU and the CUDA bindings. Every failed check is a
// ValueError (in Python too) of the form "kvcanary: <argument> must be <allowed>, got <value>".
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "integers.h"
#include "record.h"

// Usage: KVCANARY_CHECK(condition) << "plan.write_offsets must be ..., got " << value;
#define KVCANARY_CHECK(condition) \
  if (condition) {                \
  } else                          \
    TVM_FFI_THROW(ValueError) << "kvcanary: "

namespace kvcanary {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline std::string shape_text(const TensorView& tensor) {
  std::string text = "[";
  for (int32_t dim = 0; dim < tensor.ndim(); ++dim) {
    text += (dim == 0 ? "" : ", ") + std::to_string(tensor.size(dim));
  }
  return text + "]";
}

inline std::string dtype_text(DLDataType dtype) {
  const char* kind = dtype.code == kDLInt     ? "int"
                     : dtype.code == kDLUInt  ? "uint"
                     : dtype.code == kDLFloat ? "float"
                     : dtype.code == kDLBool  ? "bool"
                                              : "other";
  return kind + std::to_string(dtype.bits);
}

inline std::string device_text(DLDevice device) {
  return device.device_type == kDLCPU    ? "cpu"
         : device.device_type == kDLCUDA ? "cuda:" + std::to_string(device.device_id)
                                         : "device type " + std::to_string(device.device_type);
}

inline bool is_int(DLDataType dtype, int bits) {
  return dtype.code == kDLInt && dtype.bits == bits && dtype.lanes == 1;
}

inline void check_device(const TensorView& tensor, const char* name, DLDevice device) {
  const DLDevice actual = tensor.device();
  KVCANARY_CHECK(actual.device_type == device.device_type &&
                 (device.device_type == kDLCPU || actual.device_id == device.device_id))
      << name << " must be on the records' device " << device_text(device) << ", got "
      << device_text(actual);
}

inline void check_vector(const TensorView& tensor, const char* name, DLDevice device) {
  check_device(tensor, name, device);
  KVCANARY_CHECK(tensor.ndim() == 1)
      << name << " must have one dimension, got shape " << shape_text(tensor);
  KVCANARY_CHECK(tensor.numel() == 0 || tensor.IsContiguous())
      << name << " must be contiguous, got stride " << tensor.stride(0);
}

// The size that a tensor must have because another one has it.
inline void check_size(const char* name, int64_t actual, int64_t expected, const char* as) {
  KVCANARY_CHECK(actual == expected)
      << name << " must have " << expected << " entries like " << as << ", got " << actual;
}

inline void check_room(const char* name, int64_t actual, int64_t needed) {
  KVCANARY_CHECK(actual >= needed)
      << name << " must have at least " << needed << " entries, got " << actual;
}

// ---- one function per kind of tensor: check, then hand out what a kernel needs -----------------

inline int64_t* int64_vector(const TensorView& tensor, const char* name, DLDevice device) {
  check_vector(tensor, name, device);
  KVCANARY_CHECK(is_int(tensor.dtype(), 64))
      << name << " must be int64, got " << dtype_text(tensor.dtype());
  return static_cast<int64_t*>(tensor.data_ptr());
}

// int64 [size]; nullptr when absent.
inline int64_t* optional_int64_vector(const Optional<TensorView>& tensor, const char* name,
                                      DLDevice device, int64_t size, const char* as) {
  if (!tensor.has_value()) return nullptr;
  int64_t* data = int64_vector(tensor.value(), name, device);
  check_size(name, tensor.value().numel(), size, as);
  return data;
}

// int32 [1], for instance a count or a switch that is read on the device.
inline int32_t* int32_scalar(const TensorView& tensor, const char* name, DLDevice device) {
  check_vector(tensor, name, device);
  KVCANARY_CHECK(is_int(tensor.dtype(), 32) && tensor.numel() == 1)
      << name << " must be int32 [1], got " << dtype_text(tensor.dtype()) << " "
      << shape_text(tensor);
  return static_cast<int32_t*>(tensor.data_ptr());
}

// int32 [size]; nullptr when absent.
inline int32_t* optional_int32_vector(const Optional<TensorView>& tensor, const char* name,
                                      DLDevice device, int64_t size, const char* as) {
  if (!tensor.has_value()) return nullptr;
  check_vector(tensor.value(), name, device);
  KVCANARY_CHECK(is_int(tensor.value().dtype(), 32))
      << name << " must be int32, got " << dtype_text(tensor.value().dtype());
  check_size(name, tensor.value().numel(), size, as);
  return static_cast<int32_t*>(tensor.value().data_ptr());
}

// int32 or int64, one dimension.
inline IntArray integers(const TensorView& tensor, const char* name, DLDevice device) {
  check_vector(tensor, name, device);
  KVCANARY_CHECK(is_int(tensor.dtype(), 32) || is_int(tensor.dtype(), 64))
      << name << " must be int32 or int64, got " << dtype_text(tensor.dtype());
  return IntArray{tensor.data_ptr(), tensor.numel(), is_int(tensor.dtype(), 64)};
}

// The same with a size that another tensor dictates.
inline IntArray integers(const TensorView& tensor, const char* name, DLDevice device, int64_t size,
                         const char* as) {
  const IntArray array = integers(tensor, name, device);
  check_size(name, array.size, size, as);
  return array;
}

inline IntArray optional_integers(const Optional<TensorView>& tensor, const char* name,
                                  DLDevice device) {
  return tensor.has_value() ? integers(tensor.value(), name, device) : IntArray{};
}

inline IntArray optional_integers(const Optional<TensorView>& tensor, const char* name,
                                  DLDevice device, int64_t size, const char* as) {
  return tensor.has_value() ? integers(tensor.value(), name, device, size, as) : IntArray{};
}

// int32 or int64 [rows, width]; rows are contiguous, their distance is stride(0).
inline IntMatrix integer_matrix(const TensorView& tensor, const char* name, DLDevice device) {
  check_device(tensor, name, device);
  KVCANARY_CHECK(tensor.ndim() == 2)
      << name << " must have two dimensions, got shape " << shape_text(tensor);
  KVCANARY_CHECK(is_int(tensor.dtype(), 32) || is_int(tensor.dtype(), 64))
      << name << " must be int32 or int64, got " << dtype_text(tensor.dtype());
  KVCANARY_CHECK(tensor.size(1) <= 1 || tensor.stride(1) == 1)
      << name << " must have contiguous rows, got stride " << tensor.stride(1)
      << " in the last dimension";
  return IntMatrix{tensor.data_ptr(), tensor.size(0), tensor.size(1), tensor.stride(0),
                   is_int(tensor.dtype(), 64)};
}

inline IntMatrix optional_integer_matrix(const Optional<TensorView>& tensor, const char* name,
                                         DLDevice device) {
  return tensor.has_value() ? integer_matrix(tensor.value(), name, device) : IntMatrix{};
}

// Both given or both absent.
inline void check_together(bool first, const char* first_name, bool second,
                           const char* second_name) {
  KVCANARY_CHECK(first == second)
      << first_name << " and " << second_name << " must be given together, got only "
      << (first ? first_name : second_name);
}

inline void check_at_least(int64_t value, const char* name, int64_t minimum) {
  KVCANARY_CHECK(value >= minimum) << name << " must be at least " << minimum << ", got " << value;
}

// ---- the packed context ------------------------------------------------------------------------

// kernels/packing.py has validated the tensors behind the addresses.
inline LaunchContext read_launch(const TensorView& launch) {
  const DLDevice host{kDLCPU, 0};
  const int64_t* words = int64_vector(launch, "launch", host);
  constexpr int64_t kWords = sizeof(LaunchContext) / sizeof(int64_t);
  KVCANARY_CHECK(launch.numel() == kWords)
      << "launch must be the int64 [" << kWords << "] that packing.py makes, got "
      << shape_text(launch);
  LaunchContext context;
  std::memcpy(&context, words, sizeof(context));
  return context;
}

struct EventList {
  const Event* rows;  // on the host
  int64_t count;
};

// kernels/events.py has validated the tensors behind the addresses.
inline EventList event_list(const Optional<TensorView>& events) {
  if (!events.has_value()) return {nullptr, 0};
  const TensorView& table = events.value();
  constexpr int64_t kWords = sizeof(Event) / sizeof(int64_t);
  KVCANARY_CHECK(table.device().device_type == kDLCPU && is_int(table.dtype(), 64) &&
                 table.ndim() == 2 && table.size(1) == kWords && table.IsContiguous())
      << "events must be the int64 [k, " << kWords << "] on the host that events.py makes, got "
      << dtype_text(table.dtype()) << ' ' << shape_text(table);
  return {static_cast<const Event*>(table.data_ptr()), table.size(0)};
}

// A launch without any other tensor takes the records along: they name the device, and with it the
// stream that tvm-ffi picks.
inline void check_records(const TensorView& records, const LaunchContext& context) {
  KVCANARY_CHECK(reinterpret_cast<int64_t>(records.data_ptr()) == context.records)
      << "records must be the canary_buf of the context, got another tensor";
}

inline DLDevice launch_device(const LaunchContext& context) {
  return context.device_index < 0 ? DLDevice{kDLCPU, 0}
                                  : DLDevice{kDLCUDA, static_cast<int32_t>(context.device_index)};
}

}  // namespace kvcanary
