// The operators' way to the torch of this process: through its Python objects and DLPack, never its C++ classes, so that one
// library serves many releases. All functions need the GIL.
#pragma once

#include <Python.h>

#include <string>
#include <utility>

#include "tensor.h"

namespace multilora {

// Python's error is set.
struct PythonError {};

// An object that belongs to this variable. Raises PythonError for null, as Python's functions give it.
class Reference {
 public:
  explicit Reference(PyObject* object) : object_(object) {
    if (!object) {
      throw PythonError();
    }
  }
  Reference(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object_); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

// Finds torch. Called once, before all others. Raises Error or PythonError where torch is not as it must be.
void find_torch();

// The name of the type of an object.
std::string type_name_of(PyObject* object);

// A view of a tensor on the CPU. Raises TypeError for another object, and Error for a tensor without elements here: of a GPU,
// or a wrapper of functorch or of a compiler.
Tensor tensor_of(PyObject* object);

// A new torch.Tensor that shares the memory of a new tensor.
PyObject* to_python(const Tensor& tensor);

// Gives this thread torch's number of threads: torch does so itself only when it begins its first region on a thread.
void prepare_thread();

}  // namespace multilora
