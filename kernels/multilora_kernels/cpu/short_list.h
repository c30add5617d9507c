// A list of little work.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace multilora {

// A list whose first elements lie in the list itself: of little work, allocating memory would take as long as the work.
template <class T, int64_t kFew>
class ShortList {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  void push_back(const T& element) {
    if (size_ < kFew) {
      few_[size_] = element;
    } else {
      if (many_.empty()) {
        many_.assign(few_.begin(), few_.end());
      }
      many_.push_back(element);
    }
    ++size_;
  }
  void reserve(int64_t size) {
    if (size > kFew) {
      many_.reserve(size);
    }
  }
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T* data() const { return size_ > kFew ? many_.data() : few_.data(); }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }
  const T& operator[](int64_t i) const { return data()[i]; }
  T& back() { return const_cast<T&>(data()[size_ - 1]); }
  const T& back() const { return data()[size_ - 1]; }

 private:
  std::array<T, kFew> few_;
  std::vector<T> many_;  // all elements, once they are more
  int64_t size_ = 0;
};

}  // namespace multilora
