#include "torch_process.h"

#include <string>

#include "dlpack.h"
#include "parallel.h"

namespace multilora {
namespace {

struct Torch {
  const dlpack::Exchange* exchange;
  PyTypeObject* tensor;
  PyObject* num_threads;  // a function
} torch;

// A new reference to a.b.c, for as long as the process lives.
PyObject* found(const char* module, std::initializer_list<const char*> names) {
  PyObject* object = PyImport_ImportModule(module);
  for (const char* name : names) {
    const Reference outer(object);
    object = PyObject_GetAttrString(outer.get(), name);
  }
  if (!object) {
    throw PythonError();
  }
  return object;
}

const dlpack::Exchange* exchange_of(PyObject* tensor_type) {
  const Reference capsule(PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__"));
  const auto* exchange = static_cast<const dlpack::Exchange*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
  while (exchange && exchange->version.major > dlpack::kMajorVersion) {
    exchange = exchange->older;
  }
  MULTILORA_CHECK(exchange && exchange->version.major == dlpack::kMajorVersion && exchange->view_of,
                  "this torch exchanges no tensors by version ", dlpack::kMajorVersion, " of DLPack");
  return exchange;
}

// Python's error, which is cleared, as a sentence.
std::string message_of_python() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject* text = value ? PyObject_Str(value) : nullptr;
  Py_ssize_t size = 0;
  const char* words = text ? PyUnicode_AsUTF8AndSize(text, &size) : nullptr;
  const std::string message = words ? std::string(words, size) : "unknown";
  PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return message;
}

struct Exported {
  Tensor tensor;
  dlpack::Owned owned;
};

}  // namespace

std::string type_name_of(PyObject* object) {
  const Reference name(PyType_GetName(Py_TYPE(object)));
  const char* words = PyUnicode_AsUTF8AndSize(name.get(), nullptr);
  if (!words) {
    throw PythonError();
  }
  return words;
}

void find_torch() {
  torch.tensor = reinterpret_cast<PyTypeObject*>(found("torch", {"Tensor"}));
  find_openmp();
  torch.exchange = exchange_of(reinterpret_cast<PyObject*>(torch.tensor));
  torch.num_threads = found("torch", {"get_num_threads"});
}

Tensor tensor_of(PyObject* object) {
  MULTILORA_CHECK_TYPE(Py_TYPE(object) == torch.tensor || PyType_IsSubtype(Py_TYPE(object), torch.tensor),
                       "expected a tensor, not ", type_name_of(object));
  dlpack::View view;
  if (torch.exchange->view_of(object, &view) != 0) {
    throw Error(message_of_python());
  }
  if (view.device_type != dlpack::kCpu) {
    throw Error("expected a tensor on the CPU");
  }
  const auto dtype = static_cast<DType>(view.type_code << 8 | view.type_bits);
  return {static_cast<char*>(view.data) + view.byte_offset, dtype, view.num_dims, view.sizes, view.strides};
}

PyObject* to_python(const Tensor& tensor) {
  auto* exported = new Exported{tensor, {}};
  const Integers sizes = exported->tensor.sizes(), strides = exported->tensor.strides();
  const DType dtype = tensor.dtype();
  exported->owned = {{dlpack::kMajorVersion, dlpack::kMinorVersion},
                     exported,
                     [](dlpack::Owned* self) { delete static_cast<Exported*>(self->owner); },
                     0,
                     {tensor.data(), dlpack::kCpu, 0, int32_t(tensor.dim()), code_of(dtype), bits_of(dtype), 1,
                      const_cast<int64_t*>(sizes.data), const_cast<int64_t*>(strides.data), 0}};
  void* object = nullptr;
  if (torch.exchange->to_python(&exported->owned, &object) != 0) {
    throw PythonError();
  }
  return static_cast<PyObject*>(object);
}

void prepare_thread() {
  static thread_local bool is_ready = false;
  if (!is_ready) {
    const Reference threads(PyObject_CallNoArgs(torch.num_threads));
    is_ready = true;
  }
}

}  // namespace multilora
