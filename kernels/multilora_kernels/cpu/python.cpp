// Operators as functions of the extension module, past torch's dispatcher: its parsing of lora_apply's sixteen arguments
// takes longer than the update of one row. They refuse arguments with which the dispatcher would do more than call the operator.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "apply.h"
#include "decoder_layers.h"
#include "elementwise.h"
#include "linear.h"
#include "paged.h"

namespace multilora {
namespace {

const at::Tensor& tensor(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "expected a tensor, not ", Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

const at::Tensor* optional_tensor(PyObject* object) { return object == Py_None ? nullptr : &tensor(object); }

int64_t integer(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    throw python_error();
  }
  return value;
}

double number(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
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

// The fields of a NamedTuple, which keeps them alive.
PyObject* const* fields_of(PyObject* object, Py_ssize_t count, const char* type) {
  TORCH_CHECK_TYPE(PyTuple_Check(object) && PyTuple_GET_SIZE(object) == count, "expected ", type, ", not ",
                   Py_TYPE(object)->tp_name);
  return reinterpret_cast<PyTupleObject*>(object)->ob_item;
}

Tables tables_of(PyObject* object) {
  PyObject* const* fields = fields_of(object, 6, "LoRATables");
  return {tensor(fields[0]), tensor(fields[1]), tensor(fields[2]), tensor(fields[3]), tensor(fields[4]), integer(fields[5])};
}

Segments segments_of(PyObject* object) {
  PyObject* const* fields = fields_of(object, 6, "LoRASegments");
  return {tensor(fields[0]), tensor(fields[1]), tensor(fields[2]), tensor(fields[3])};
}

Sequences sequences_of(PyObject* object) {
  PyObject* const* fields = fields_of(object, 6, "PagedSequences");
  return {tensor(fields[0]), tensor(fields[1]), tensor(fields[2]), integer(fields[3]), integer(fields[4]),
          fields[5] == Py_None ? 0 : integer(fields[5])};
}

AttentionOptions attention_options_of(PyObject* object, int64_t head_dim) {
  PyObject* const* fields = fields_of(object, 4, "AttentionOptions");
  return {fields[0] == Py_None ? std::pow(double(head_dim), -0.5) : number(fields[0]), number(fields[1]),
          optional_tensor(fields[2]), fields[3] == Py_True};
}

// A tensor, or QuantizedPanels.
Panels panels_of(PyObject* object) {
  if (!PyTuple_Check(object)) {
    return {tensor(object)};
  }
  PyObject* const* fields = fields_of(object, 5, "QuantizedPanels");
  return {tensor(fields[0]), Scaling{tensor(fields[1]), optional_tensor(fields[2]), integer(fields[3]), integer(fields[4])}};
}

LayerLinear layer_linear_of(PyObject* object) {
  PyObject* const* fields = fields_of(object, 4, "PackedLayerLinear");
  return {panels_of(fields[0]), optional_tensor(fields[1]), integer(fields[2]), integers(fields[3])};
}

LayerWeights layer_weights_of(PyObject* object) {
  PyObject* const* fields = fields_of(object, 7, "PackedLayer");
  return {tensor(fields[0]),          tensor(fields[3]),          layer_linear_of(fields[1]), layer_linear_of(fields[2]),
          layer_linear_of(fields[4]), layer_linear_of(fields[5]), number(fields[6])};
}

PyObject* pair_of(std::tuple<at::Tensor, at::Tensor> tensors) {
  const THPObjectPtr first(THPVariable_Wrap(std::get<0>(std::move(tensors)))),
      second(THPVariable_Wrap(std::get<1>(std::move(tensors))));
  return PyTuple_Pack(2, first.get(), second.get());
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
  const at::Tensor& x = tensor(arguments[0]);
  const Panels panels = panels_of(arguments[1]);
  if (needs_dispatcher(x, panels.data)) {
    Py_RETURN_NONE;
  }
  const Tables tables = tables_of(arguments[2]);
  const int64_t first_slice = integer(arguments[3]);
  const auto slice_sizes = integers(arguments[4]);
  const Segments segments = segments_of(arguments[5]);
  const at::Tensor* bias = optional_tensor(arguments[6]);
  at::Tensor y;
  {
    const pybind11::gil_scoped_release no_gil;
    y = multilora::lora_linear(x, panels, first_slice, slice_sizes, tables, segments, bias);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// An operator of an activation or tokens, panels and their number of outputs: a linear or an embedding.
using PackedOperator = at::Tensor (*)(const at::Tensor&, const Panels&, int64_t);

at::Tensor packed_linear(const at::Tensor& x, const Panels& panels, int64_t out_features) {
  return multilora::packed_linear(x, panels, out_features, nullptr);
}

at::Tensor packed_embedding(const at::Tensor& token_ids, const Panels& panels, int64_t num_embeddings) {
  return panels.scaling ? quantized_embedding(token_ids, panels, num_embeddings)
                        : multilora::packed_embedding(token_ids, panels.data, num_embeddings);
}

template <PackedOperator op>
PyObject* packed(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(num_arguments == 3, "expected an activation, panels and the number of outputs");
  const at::Tensor& x = tensor(arguments[0]);
  const Panels panels = panels_of(arguments[1]);
  if (needs_dispatcher(x, panels.data)) {
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

PyObject* add_rms_norm_of(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(num_arguments == 4, "add_rms_norm takes x, update, weight and eps");
  const at::Tensor &x = tensor(arguments[0]), &update = tensor(arguments[1]), &weight = tensor(arguments[2]);
  if (needs_dispatcher(x, update)) {
    Py_RETURN_NONE;
  }
  const double eps = number(arguments[3]);
  std::tuple<at::Tensor, at::Tensor> results;
  {
    const pybind11::gil_scoped_release no_gil;
    results = add_rms_norm(x, update, weight, eps);
  }
  return pair_of(std::move(results));
  END_HANDLE_TH_ERRORS
}

PyObject* add_layer_norm_of(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(num_arguments == 5, "add_layer_norm takes x, update, weight, bias and eps");
  const at::Tensor &x = tensor(arguments[0]), &update = tensor(arguments[1]), &weight = tensor(arguments[2]);
  if (needs_dispatcher(x, update)) {
    Py_RETURN_NONE;
  }
  const at::Tensor* bias = optional_tensor(arguments[3]);
  const double eps = number(arguments[4]);
  std::tuple<at::Tensor, at::Tensor> results;
  {
    const pybind11::gil_scoped_release no_gil;
    results = add_layer_norm(x, update, weight, bias, eps);
  }
  return pair_of(std::move(results));
  END_HANDLE_TH_ERRORS
}

// An operator of one tensor: `silu_mul`, `gelu_tanh_mul` and `gelu_tanh`.
using Activation = at::Tensor (*)(const at::Tensor&);

template <Activation op>
PyObject* activated(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(num_arguments == 1, "expected one tensor");
  const at::Tensor& x = tensor(arguments[0]);
  if (needs_dispatcher(x, x)) {
    Py_RETURN_NONE;
  }
  at::Tensor y;
  {
    const pybind11::gil_scoped_release no_gil;
    y = op(x);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

PyObject* rotary_attention_of(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(num_arguments == 9,
                   "rotary_attention takes qkv, cos, sin, keys, values, slots, sequences, options and is_interleaved");
  const at::Tensor &qkv = tensor(arguments[0]), &keys = tensor(arguments[3]);
  if (needs_dispatcher(qkv, keys)) {
    Py_RETURN_NONE;
  }
  const Angles angles{tensor(arguments[1]), tensor(arguments[2]), arguments[8] == Py_True};
  const at::Tensor &values = tensor(arguments[4]), &slots = tensor(arguments[5]);
  const Sequences sequences = sequences_of(arguments[6]);
  const AttentionOptions options = attention_options_of(arguments[7], head_dim_of(keys));
  at::Tensor out;
  {
    const pybind11::gil_scoped_release no_gil;
    out = rotary_attention(qkv, angles, keys, values, slots, sequences, options);
  }
  return THPVariable_Wrap(std::move(out));
  END_HANDLE_TH_ERRORS
}

LayerStep layer_step_of(PyObject* object) {
  PyObject* const* fields = fields_of(object, 8, "LayerStep");
  const AttentionOptions attention{number(fields[4]), 0, nullptr, fields[5] == Py_True};
  LayerStep step{tensor(fields[0]), tensor(fields[1]), tensor(fields[2]), sequences_of(fields[3]), attention, {}};
  if (fields[6] != Py_None) {
    step.adapters.emplace(Adapters{tables_of(fields[6]), segments_of(fields[7])});
  }
  return step;
}

std::vector<Layer> layers_of(PyObject* object) {
  TORCH_CHECK_TYPE(PyList_Check(object), "expected a list of layers, not ", Py_TYPE(object)->tp_name);
  std::vector<Layer> layers;
  layers.reserve(PyList_GET_SIZE(object));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
    PyObject* const* fields = fields_of(PyList_GET_ITEM(object, i), 4, "a layer, its keys and values, and a step");
    layers.push_back({layer_weights_of(fields[0]), tensor(fields[1]), tensor(fields[2]), layer_step_of(fields[3])});
  }
  return layers;
}

PyObject* decoder_layers_of(PyObject*, PyObject* const* arguments, Py_ssize_t num_arguments) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(num_arguments == 4, "decoder_layers takes layers, x, update and on_layer");
  const at::Tensor &x = tensor(arguments[1]), &update = tensor(arguments[2]);
  if (needs_dispatcher(x, update)) {
    Py_RETURN_NONE;
  }
  const std::vector<Layer> layers = layers_of(arguments[0]);
  const auto on_layer = [&] {
    const pybind11::gil_scoped_acquire gil;
    if (!THPObjectPtr(PyObject_CallNoArgs(arguments[3]))) {
      python_error error;
      error.persist();
      throw error;
    }
  };
  std::tuple<at::Tensor, at::Tensor> results;
  {
    const pybind11::gil_scoped_release no_gil;
    results = decoder_layers(layers, x, update, on_layer);
  }
  return pair_of(std::move(results));
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
    method("packed_linear", packed<packed_linear>,
           "packed_linear(x, panels, out_features) -> the product, or None: then use the operator"),
    method("packed_embedding", packed<packed_embedding>,
           "packed_embedding(token_ids, panels, num_embeddings) -> the rows, or None: then use the operator"),
    method("add_rms_norm", add_rms_norm_of,
           "add_rms_norm(x, update, weight, eps) -> (normed, total), or None: then use the operator"),
    method("add_layer_norm", add_layer_norm_of,
           "add_layer_norm(x, update, weight, bias, eps) -> (normed, total), or None: then use the operator"),
    method("silu_mul", activated<silu_mul>, "silu_mul(gate_up) -> the product, or None: then use the operator"),
    method("gelu_tanh_mul", activated<gelu_tanh_mul>,
           "gelu_tanh_mul(gate_up) -> the product, or None: then use the operator"),
    method("gelu_tanh", activated<gelu_tanh>, "gelu_tanh(x) -> the same shape, or None: then use the operator"),
    method("rotary_attention", rotary_attention_of,
           "rotary_attention(qkv, cos, sin, keys, values, slots, sequences, options, is_interleaved) -> the heads' outputs, "
           "or None: then use the operator"),
    method("decoder_layers", decoder_layers_of,
           "decoder_layers([(layer, keys, values, step)], x, update, on_layer) -> (x, update), or None: then use their "
           "operators"),
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "multilora_cpu", nullptr, -1, methods};

}  // namespace
}  // namespace multilora

PyMODINIT_FUNC PyInit_multilora_cpu() { return PyModule_Create(&multilora::module); }
