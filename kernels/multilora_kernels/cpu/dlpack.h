// The part of DLPack's C interface by which tensors come from torch and go to it. It is the same for all torch releases, unlike
// torch's own classes.
//
// Source: DLPack 1.3, "C API", https://dmlc.github.io/dlpack/latest/c_api.html; fields and their order are fixed for version 1.
#pragma once

#include <cstdint>

namespace multilora::dlpack {

constexpr uint32_t kMajorVersion = 1, kMinorVersion = 3;
constexpr int32_t kCpu = 1;

struct Version {
  uint32_t major, minor;
};

struct View {
  void* data;
  int32_t device_type, device_id;
  int32_t num_dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t *sizes, *strides;
  uint64_t byte_offset;
};

// A tensor that somebody has made. Its user calls `end` when it is no longer in use.
struct Owned {
  Version version;
  void* owner;
  void (*end)(Owned* self);
  uint64_t flags;
  View view;
};

// The functions of a library of tensors. Those that give an int give 0, or set Python's error.
struct Exchange {
  Version version;
  const Exchange* older;
  void* allocate;
  void* owned_of;
  int (*to_python)(Owned* tensor, void** object);
  int (*view_of)(void* object, View* view);  // null where the library has none
  void* stream_of;
};

}  // namespace multilora::dlpack
