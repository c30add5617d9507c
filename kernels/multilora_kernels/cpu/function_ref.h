// A reference to a function.
#pragma once

#include <type_traits>

namespace multilora {

// A function that lies elsewhere, and is called while it does.
template <class Signature>
class FunctionRef;

template <class Result, class... Arguments>
class FunctionRef<Result(Arguments...)> {
 public:
  template <class Function, std::enable_if_t<!std::is_same_v<std::remove_cvref_t<Function>, FunctionRef>, int> = 0>
  FunctionRef(Function&& function)
      : function_(const_cast<void*>(static_cast<const void*>(&function))),
        call_([](void* it, Arguments... arguments) -> Result {
          return (*static_cast<std::remove_reference_t<Function>*>(it))(arguments...);
        }) {}

  Result operator()(Arguments... arguments) const { return call_(function_, arguments...); }

 private:
  void* function_;
  Result (*call_)(void*, Arguments...);
};

}  // namespace multilora
