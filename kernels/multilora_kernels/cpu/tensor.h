// Tensors as the operators see them: views of torch's tensors, which Python keeps alive, and new ones.
#pragma once

#include <cstdint>
#include <memory>

#include "checks.h"
#include "storage.h"

namespace multilora {

// An element type: DLPack's code of its kind, and its bits.
enum class DType : uint16_t {
  int8 = 0 << 8 | 8,
  int32 = 0 << 8 | 32,
  int64 = 0 << 8 | 64,
  uint8 = 1 << 8 | 8,
  float16 = 2 << 8 | 16,
  float32 = 2 << 8 | 32,
  float64 = 2 << 8 | 64,
  bfloat16 = 4 << 8 | 16,
  float8_e4m3fn = 10 << 8 | 8,
};

constexpr uint8_t code_of(DType dtype) { return uint16_t(dtype) >> 8; }
constexpr uint8_t bits_of(DType dtype) { return uint16_t(dtype) & 0xff; }
// As torch calls it.
Text name_of(DType dtype);

template <class T>
constexpr DType kTypeOf = DType();
template <>
inline constexpr DType kTypeOf<int8_t> = DType::int8;
template <>
inline constexpr DType kTypeOf<int32_t> = DType::int32;
template <>
inline constexpr DType kTypeOf<int64_t> = DType::int64;
template <>
inline constexpr DType kTypeOf<uint8_t> = DType::uint8;
template <>
inline constexpr DType kTypeOf<Float16> = DType::float16;
template <>
inline constexpr DType kTypeOf<float> = DType::float32;
template <>
inline constexpr DType kTypeOf<double> = DType::float64;
template <>
inline constexpr DType kTypeOf<BFloat16> = DType::bfloat16;
template <>
inline constexpr DType kTypeOf<Float8> = DType::float8_e4m3fn;

// Integers that lie elsewhere, such as the sizes of a tensor.
struct Integers {
  const int64_t* data = nullptr;
  int64_t count = 0;

  Integers() = default;
  Integers(const int64_t* data, int64_t count) : data(data), count(count) {}

  int64_t size() const { return count; }
  int64_t operator[](int64_t i) const { return data[i]; }
  const int64_t* begin() const { return data; }
  const int64_t* end() const { return data + count; }
  bool operator==(const Integers& other) const;
  // Such as [2, 3].
  operator Text() const;
};

class Tensor {
 public:
  static constexpr int64_t kMostDims = 5;  // of a new one

  Tensor() = default;
  // A view: neither elements nor sizes and strides, of elements, are copied.
  Tensor(void* data, DType dtype, int64_t dim, const int64_t* sizes, const int64_t* strides)
      : data_(static_cast<char*>(data)), sizes_(sizes), strides_(strides), dim_(dim), dtype_(dtype) {}
  // A new, contiguous one with any elements, the first at the beginning of a cache line.
  static Tensor empty(Integers sizes, DType dtype);
  static Tensor empty(std::initializer_list<int64_t> sizes, DType dtype) {
    return empty(Integers(sizes.begin(), sizes.size()), dtype);
  }

  // The same view with sizes and strides of its own.
  Tensor with_own_shape() const;
  // A view of the parts first .. first + count of the first dimension, which the tensor itself must outlive.
  Tensor part(int64_t first, int64_t count) const;

  bool is_defined() const { return sizes_ != nullptr; }
  int64_t dim() const { return dim_; }
  Integers sizes() const { return {sizes_, dim_}; }
  Integers strides() const { return {strides_, dim_}; }
  // Of one dimension; -1 is the last one.
  int64_t size(int64_t dim) const { return sizes_[checked(dim)]; }
  int64_t stride(int64_t dim) const { return strides_[checked(dim)]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = 0; i < dim_; ++i) {
      count *= sizes_[i];
    }
    return count;
  }
  bool is_contiguous() const;
  DType dtype() const { return dtype_; }
  int64_t element_size() const { return bits_of(dtype_) / 8; }
  void* data() const { return data_; }
  // Refuses elements of another type.
  template <class T>
  T* data() const {
    MULTILORA_CHECK(dtype_ == kTypeOf<T>, "expected ", name_of(kTypeOf<T>), ", not ", name_of(dtype_));
    return reinterpret_cast<T*>(data_);
  }
  bool is_same(const Tensor& other) const { return data_ == other.data_ && dtype_ == other.dtype_; }

 private:
  struct Memory;

  int64_t checked(int64_t dim) const {
    MULTILORA_CHECK_INDEX(dim >= -dim_ && dim < dim_, "dimension ", dim, " of a tensor of ", sizes());
    return dim < 0 ? dim + dim_ : dim;
  }

  char* data_ = nullptr;
  const int64_t *sizes_ = nullptr, *strides_ = nullptr;
  int64_t dim_ = 0;
  DType dtype_{};
  std::shared_ptr<const Memory> memory_;  // null for a view
};

// The tensor itself if it is contiguous, or a copy that is.
Tensor contiguous(const Tensor& x);

// Contiguous float32: the tensor itself if it is, or a copy. x: float32, float64, bfloat16 or float16.
Tensor as_float32(const Tensor& x);

// float32 x, or a copy of it in another of these types, each element the nearest.
Tensor from_float32(const Tensor& x, DType dtype);

// From now on, or no longer, new tensors are full of NaN, of -1 if they are integers: a test sees elements that nobody wrote.
void poison_new_tensors(bool is_on);

// Puts the elements of x into y, of the same sizes and of any of these types.
void copy(const Tensor& x, const Tensor& y);

}  // namespace multilora
