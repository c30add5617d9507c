// Errors that Python sees, with messages that name the numbers.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace multilora {

// Raised in Python as RuntimeError.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Raised in Python as IndexError.
struct IndexError : Error {
  using Error::Error;
};

// Raised in Python as TypeError.
struct TypeError : Error {
  using Error::Error;
};

// A part of a message.
struct Text {
  std::string text;

  Text(const char* words) : text(words) {}
  Text(std::string words) : text(std::move(words)) {}
  Text(double number);
  template <class Number, std::enable_if_t<std::is_integral_v<Number>, int> = 0>
  Text(Number number) : text(std::to_string(number)) {}
};

std::string joined(std::initializer_list<Text> parts);

}  // namespace multilora

// Raises an error with the parts of a message, which are looked at only then, unless the condition holds.
#define MULTILORA_CHECK_AS(Kind, condition, ...)                   \
  do {                                                             \
    if (!(condition)) [[unlikely]] {                               \
      throw ::multilora::Kind(::multilora::joined({__VA_ARGS__})); \
    }                                                              \
  } while (false)
#define MULTILORA_CHECK(condition, ...) MULTILORA_CHECK_AS(Error, condition, __VA_ARGS__)
#define MULTILORA_CHECK_INDEX(condition, ...) MULTILORA_CHECK_AS(IndexError, condition, __VA_ARGS__)
#define MULTILORA_CHECK_TYPE(condition, ...) MULTILORA_CHECK_AS(TypeError, condition, __VA_ARGS__)
