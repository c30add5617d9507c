// Operators as functions of the extension module, past torch's dispatcher: its parsing of lora_apply's sixteen arguments
// takes longer than the update of one row. They refuse what the dispatcher would do more with than to call the operator.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include "apply.h"
#include "linear.h"

namespace multilora {
namespace {

// An attribute of a frozen dataclass, which keeps it alive.
PyObject* field(PyObject* owner, PyObject* name) {
  PyObject* value = PyObject_GetAttr(owner, name);
  if (!value) {
    throw python_error();
  }
  Py_DECREF(value);
  return value;
}

const at::Tensor& tensor(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "expected a tensor, not ", Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

int64_t integer(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    throw python_error();
  }
  return value;
}

c10::SmallVector<int64_t, 8> integers(PyObject* object) {
  const THPObjectPtr sequence(PySequence_Fast(object, "slice_sizes is a sequence of integers"));
  if (!sequence) {
    throw python_error();
  }
  c10::SmallVector<int64_t, 8> values;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.get()); ++i) {
    values.push_back(integer(PySequence_Fast_GET_ITEM(sequence.get(), i)));
  }
  return values;
}

Tables tables_of(PyObject* object) {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("arena"),    PyUnicode_InternFromString("rank"),
      PyUnicode_InternFromString("a_offset"), PyUnicode_InternFromString("b_offset"),
      PyUnicode_InternFromString("magnitude_offset"), PyUnicode_InternFromString("max_rank")};
  return {tensor(field(object, names[0])), tensor(field(object, names[1])), tensor(field(object, names[2])),
          tensor(field(object, names[3])), tensor(field(object, names[4])), integer(field(object, names[5]))};
}

Segments segments_of(PyObject* object) {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("permutation"), PyUnicode_InternFromString("chunk_start"),
      PyUnicode_InternFromString("chunk_length"), PyUnicode_InternFromString("chunk_lora_index")};
  return {tensor(field(object, names[0])), tensor(field(object, names[1])), tensor(field(object, names[2])),
          tensor(field(object, names[3]))};
}

// Whether the dispatcher would do more than call the CPU operator: for fake and other subclasses of tensors, dispatch
// modes, functorch, autograd and the profiler.
bool needs_dispatcher(const at::Tensor& x, const at::Tensor& y) {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet ignored =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  const c10::DispatchKeySet keys = ((x.key_set() | y.key_set() | local.included_) - local.excluded_) - ignored;
  const bool is_plain = keys == c10::DispatchKeySet(c10::DispatchKey::CPU);
  return !is_plain || x.requires_grad() || y.requires_grad() || at::hasCallbacks();
}

PyObject* lora_apply(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(num_arguments == 6, "lora_apply takes x, y, tables, first_slice, slice_sizes and segments");
  const at::Tensor &x = tensor(arguments[0]), &y = tensor(arguments[1]);
  if (needs_dispatcher(x, y)) {
    Py_RETURN_FALSE;
  }
  const Tables tables = tables_of(arguments[2]);
  const int64_t first_slice = integer(arguments[3]);
  const auto slice_sizes = integers(arguments[4]);
  const Segments segments = segments_of(arguments[5]);
  {
    const pybind11::gil_scoped_release no_gil;
    apply(x, y, first_slice, slice_sizes, tables, segments);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* lora_linear(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(num_arguments == 7, "lora_linear takes x, panels, tables, first_slice, slice_sizes, segments and bias");
  const at::Tensor &x = tensor(arguments[0]), &panels = tensor(arguments[1]);
  if (needs_dispatcher(x, panels)) {
    Py_RETURN_NONE;
  }
  const Tables tables = tables_of(arguments[2]);
  const int64_t first_slice = integer(arguments[3]);
  const auto slice_sizes = integers(arguments[4]);
  const Segments segments = segments_of(arguments[5]);
  const at::Tensor* bias = arguments[6] == Py_None ? nullptr : &tensor(arguments[6]);
  at::Tensor y;
  {
    const pybind11::gil_scoped_release no_gil;
    y = multilora::lora_linear(x, panels, first_slice, slice_sizes, tables, segments, bias);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// An operator of an activation, packed weights and their number of outputs: `packed_linear` and `packed_embedding`.
using PackedOperator = at::Tensor (*)(const at::Tensor&, const at::Tensor&, int64_t);

template <PackedOperator op>
PyObject* packed(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(num_arguments == 3, "expected an activation, panels and the number of outputs");
  const at::Tensor &x = tensor(arguments[0]), &panels = tensor(arguments[1]);
  if (needs_dispatcher(x, panels)) {
    Py_RETURN_NONE;
  }
  const int64_t out_features = integer(arguments[2]);
  at::Tensor y;
  {
    const pybind11::gil_scoped_release no_gil;
    y = op(x, panels, out_features);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef method(const char* name, FastCall function, const char* help) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, help};
}

PyMethodDef methods[] = {
    method("lora_apply", lora_apply,
           "lora_apply(x, y, tables, first_slice, slice_sizes, segments) -> whether it was done, else use the operator"),
    method("lora_linear", lora_linear,
           "lora_linear(x, panels, tables, first_slice, slice_sizes, segments, bias) -> y, or None: then use the operator"),
    method("packed_linear", packed<multilora::packed_linear>,
           "packed_linear(x, panels, out_features) -> the product, or None: then use the operator"),
    method("packed_embedding", packed<multilora::packed_embedding>,
           "packed_embedding(token_ids, panels, num_embeddings) -> the rows, or None: then use the operator"),
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "multilora_cpu", nullptr, -1, methods};

}  // namespace
}  // namespace multilora

PyMODINIT_FUNC PyInit_multilora_cpu() { return PyModule_Create(&multilora::module); }
