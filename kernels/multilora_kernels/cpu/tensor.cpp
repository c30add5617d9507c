#include "tensor.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <type_traits>

#include "cache_lines.h"
#include "turns.h"

namespace multilora {
namespace {

// Elements that are worth a thread.
constexpr int64_t kGrainElements = 1 << 15;

std::atomic<bool> is_poisoned{false};

// Calls body(From{}, To{}) with values of the two types, one of which is float.
template <class Body>
void with_types(DType from, DType to, const Body& body) {
  const auto with_float = [&](DType other, const auto& body_of) {
    switch (other) {
      case DType::float32:
        return body_of(float{});
      case DType::float64:
        return body_of(double{});
      case DType::bfloat16:
        return body_of(BFloat16{});
      case DType::float16:
        return body_of(Float16{});
      default:
        MULTILORA_CHECK(false, "expected float32, float64, bfloat16 or float16, not ", name_of(other));
    }
  };
  if (to == DType::float32) {
    with_float(from, [&](auto value) { body(value, float{}); });
  } else {
    MULTILORA_CHECK(from == DType::float32, "no copy from ", name_of(from), " to ", name_of(to));
    with_float(to, [&](auto value) { body(float{}, value); });
  }
}

// Puts elements from one place to another, by dimensions from the first one on.
template <class From, class To>
struct Copy {
  Integers sizes, from_strides, to_strides;

  void run(const From* from, To* to, int64_t dim, int64_t begin, int64_t end) const {
    const int64_t from_stride = from_strides[dim], to_stride = to_strides[dim];
    from += begin * from_stride;
    to += begin * to_stride;
    if (dim + 1 < sizes.size()) {
      for (int64_t i = begin; i < end; ++i, from += from_stride, to += to_stride) {
        run(from, to, dim + 1, 0, sizes[dim + 1]);
      }
    } else if (from_stride == 1 && to_stride == 1) {
      run_row(from, to, end - begin);
    } else {
      for (int64_t i = begin; i < end; ++i, from += from_stride, to += to_stride) {
        *to = value(*from);
      }
    }
  }
  static void run_row(const From* from, To* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = value(from[i]);
    }
  }
  static To value(From from) {
    if constexpr (std::is_same_v<From, To>) {
      return from;
    } else {
      return nearest<To>(to_float(from));
    }
  }
};

template <class From, class To>
void copy_as(const Tensor& x, const Tensor& y) {
  const auto* from = static_cast<const From*>(x.data());
  auto* to = static_cast<To*>(y.data());
  if (x.dim() == 0) {
    *to = Copy<From, To>::value(*from);
    return;
  }
  if (x.numel() == 0) {
    return;
  }
  const Copy<From, To> copy{x.sizes(), x.strides(), y.strides()};
  const int64_t rows = x.size(0), grain = std::max<int64_t>(1, kGrainElements * rows / x.numel());
  rows_in_ranges(rows, grain, [&](int64_t begin, int64_t end) { copy.run(from, to, 0, begin, end); });
}

}  // namespace

Text name_of(DType dtype) {
  const int bits = bits_of(dtype);
  const char* kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex"};
  if (dtype == DType::float8_e4m3fn) {
    return "float8_e4m3fn";
  }
  if (code_of(dtype) < std::size(kinds)) {
    return kinds[code_of(dtype)] + std::to_string(bits);
  }
  return code_of(dtype) == 6 ? "bool" : "another type";
}

Text::Text(double number) {
  char words[32];
  std::snprintf(words, sizeof(words), "%g", number);
  text = words;
}

std::string joined(std::initializer_list<Text> parts) {
  std::string all;
  for (const Text& part : parts) {
    all += part.text;
  }
  return all;
}

bool Integers::operator==(const Integers& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

Integers::operator Text() const {
  std::string text = "[";
  for (int64_t i = 0; i < count; ++i) {
    text += (i ? ", " : "") + std::to_string(data[i]);
  }
  return text + "]";
}

namespace {

// Memory of tensors of this thread that are no more, for new ones of about their size. A step makes the same tensors again and
// again, and malloc, which joins and splits its memory each time, takes half a microsecond for one.
class UsedMemory {
 public:
  UsedMemory() = default;
  UsedMemory(const UsedMemory&) = delete;
  ~UsedMemory() {
    for (auto& [places, count] : of_sizes_) {
      std::for_each_n(places.begin(), count, std::free);
    }
    is_over_ = true;
  }

  // At least so many bytes, the first at the beginning of a cache line. Raises std::bad_alloc.
  static void* take(size_t bytes) {
    Places* kept = kept_for(bytes);
    if (kept && kept->count > 0) {
      return kept->places[--kept->count];
    }
    void* place = nullptr;
    if (posix_memalign(&place, kCacheLine, bytes > kMostBytes ? bytes : std::bit_ceil(bytes)) != 0) {
      throw std::bad_alloc();
    }
    return place;
  }
  // For memory of `take` for the same number of bytes, by any thread.
  static void give(void* place, size_t bytes) {
    Places* kept = kept_for(bytes);
    if (kept && kept->count < kPlaces) {
      kept->places[kept->count++] = place;
    } else {
      std::free(place);
    }
  }

 private:
  static constexpr int kPlaces = 8;  // of a size
  // Of the largest size. What a step with larger tensors does takes far longer than malloc.
  static constexpr size_t kMostBytes = 1 << 18;

  struct Places {
    std::array<void*, kPlaces> places;
    int count = 0;
  };

  // Null for memory that is not kept. Sizes are powers of two.
  static Places* kept_for(size_t bytes) {
    return bytes > kMostBytes || is_over_ ? nullptr : &of_thread_.of_sizes_[std::bit_width(bytes - 1)];
  }

  static thread_local UsedMemory of_thread_;
  static inline thread_local bool is_over_ = false;  // of a thread that ends, whose last tensors may go later

  std::array<Places, std::bit_width(kMostBytes)> of_sizes_;
};

thread_local UsedMemory UsedMemory::of_thread_;

}  // namespace

struct Tensor::Memory {
  std::array<int64_t, kMostDims> sizes, strides;
  void* data = nullptr;
  size_t bytes = 0;

  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() {
    if (data) {
      UsedMemory::give(data, bytes);
    }
  }
};

Tensor Tensor::empty(Integers sizes, DType dtype) {
  MULTILORA_CHECK(sizes.size() <= kMostDims, "a new tensor of ", sizes);
  auto memory = std::make_shared<Memory>();
  int64_t count = 1;
  for (int64_t i = sizes.size() - 1; i >= 0; --i) {
    MULTILORA_CHECK(sizes[i] >= 0, "a new tensor of ", sizes);
    memory->sizes[i] = sizes[i];
    memory->strides[i] = count;
    count *= std::max<int64_t>(sizes[i], 1);
  }
  Tensor tensor(nullptr, dtype, sizes.size(), memory->sizes.data(), memory->strides.data());
  const size_t bytes = tensor.numel() * tensor.element_size();
  if (bytes > 0) {
    memory->data = UsedMemory::take(bytes);
    memory->bytes = bytes;
  }
  if (is_poisoned.load(std::memory_order_relaxed) && bytes > 0) {
    std::memset(memory->data, 0xff, bytes);
  }
  tensor.data_ = static_cast<char*>(memory->data);
  tensor.memory_ = std::move(memory);
  return tensor;
}

Tensor Tensor::with_own_shape() const {
  MULTILORA_CHECK(dim_ <= kMostDims, "a shape of ", sizes());
  auto memory = std::make_shared<Memory>();
  std::copy_n(sizes_, dim_, memory->sizes.begin());
  std::copy_n(strides_, dim_, memory->strides.begin());
  Tensor tensor(data_, dtype_, dim_, memory->sizes.data(), memory->strides.data());
  tensor.memory_ = std::move(memory);
  return tensor;
}

Tensor Tensor::part(int64_t first, int64_t count) const {
  MULTILORA_CHECK(dim_ > 0 && dim_ <= kMostDims && first >= 0 && count >= 0 && first + count <= sizes_[0], "parts ", first,
                  " .. ", first + count, " of a tensor of ", sizes());
  auto memory = std::make_shared<Memory>();
  std::copy_n(sizes_, dim_, memory->sizes.begin());
  std::copy_n(strides_, dim_, memory->strides.begin());
  memory->sizes[0] = count;
  Tensor tensor(data_ + first * strides_[0] * element_size(), dtype_, dim_, memory->sizes.data(), memory->strides.data());
  tensor.memory_ = std::move(memory);
  return tensor;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  for (int64_t i = dim_ - 1; i >= 0; --i) {
    if (sizes_[i] == 0) {
      return true;
    }
    if (sizes_[i] != 1) {
      if (strides_[i] != expected) {
        return false;
      }
      expected *= sizes_[i];
    }
  }
  return true;
}

Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) {
    return x;
  }
  Tensor y = Tensor::empty(x.sizes(), x.dtype());
  copy(x, y);
  return y;
}

Tensor as_float32(const Tensor& x) {
  if (x.dtype() == DType::float32) {
    return contiguous(x);
  }
  Tensor y = Tensor::empty(x.sizes(), DType::float32);
  copy(x, y);
  return y;
}

Tensor from_float32(const Tensor& x, DType dtype) {
  if (dtype == DType::float32) {
    return x;
  }
  Tensor y = Tensor::empty(x.sizes(), dtype);
  copy(x, y);
  return y;
}

void poison_new_tensors(bool is_on) { is_poisoned = is_on; }

void copy(const Tensor& x, const Tensor& y) {
  if (x.dtype() == DType::int64 && y.dtype() == DType::int64) {
    copy_as<int64_t, int64_t>(x, y);
    return;
  }
  with_types(x.dtype(), y.dtype(), [&](auto from, auto to) { copy_as<decltype(from), decltype(to)>(x, y); });
}

}  // namespace multilora
