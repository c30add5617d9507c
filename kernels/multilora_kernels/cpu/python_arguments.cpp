#include "python_arguments.h"

#include <cmath>
#include <string_view>

namespace multilora {
namespace {

// The fields of a NamedTuple, which keeps them alive.
class Fields {
 public:
  Fields(PyObject* object, Py_ssize_t count, const char* type) : object_(object) {
    MULTILORA_CHECK_TYPE(PyTuple_Check(object) && PyTuple_Size(object) == count, "expected ", type, ", not ",
                         type_name_of(object));
  }
  PyObject* operator[](Py_ssize_t i) const { return PyTuple_GetItem(object_, i); }

 private:
  PyObject* object_;
};

Tables read_tables(PyObject* object) {
  const Fields fields(object, 6, "LoRATables");
  return {tensor_of(fields[0]), tensor_of(fields[1]), tensor_of(fields[2]),
          tensor_of(fields[3]), tensor_of(fields[4]), integer_of(fields[5])};
}

Segments read_segments(PyObject* object) {
  const Fields fields(object, 6, "LoRASegments");
  return {tensor_of(fields[0]), tensor_of(fields[1]), tensor_of(fields[2]), tensor_of(fields[3])};
}

// The tuple that was read last, and its value: all linears of a step share one, and its tensors, which come from as many places
// in memory, take longer to look at than the update of one row. A reference keeps the tuple, so that no other is at its place.
// Python's lock guards it.
template <class Value, Value (*read)(PyObject*)>
class LastRead {
 public:
  Value value_of(PyObject* object) {
    if (object == object_) {
      return value_;
    }
    const Value value = read(object);
    Py_INCREF(object);
    keep(object, value);
    return value;
  }
  void forget() { keep(nullptr, {}); }

 private:
  // The end of the tuple before may run other code of Python, which finds the new one.
  void keep(PyObject* object, const Value& value) {
    PyObject* before = object_;
    object_ = object;
    value_ = value;
    Py_XDECREF(before);
  }

  PyObject* object_ = nullptr;
  Value value_;
};

LastRead<Tables, read_tables> last_tables;
LastRead<Segments, read_segments> last_segments;

LayerLinear layer_linear_of(PyObject* object) {
  const Fields fields(object, 4, "PackedLayerLinear");
  return {panels_of(fields[0]), optional_tensor_of(fields[1]), integer_of(fields[2]), integers_of(fields[3])};
}

LayerWeights layer_weights_of(PyObject* object) {
  const Fields fields(object, 7, "PackedLayer");
  return {tensor_of(fields[0]),       tensor_of(fields[3]),       layer_linear_of(fields[1]), layer_linear_of(fields[2]),
          layer_linear_of(fields[4]), layer_linear_of(fields[5]), number_of(fields[6])};
}

LayerStep layer_step_of(PyObject* object) {
  const Fields fields(object, 8, "LayerStep");
  const AttentionOptions attention{number_of(fields[4]), 0, {}, {}, fields[5] == Py_True};
  LayerStep step{tensor_of(fields[0]), tensor_of(fields[1]), tensor_of(fields[2]), sequences_of(fields[3]), attention, {}};
  if (fields[6] != Py_None) {
    step.adapters.emplace(Adapters{tables_of(fields[6]), blocks_of(segments_of(fields[7]))});
  }
  return step;
}

// Torch's sizes and strides lie wherever a tensor does: a step, which reads those of all weights, would wait for each of them.
void take_shapes(std::initializer_list<Tensor*> tensors) {
  for (Tensor* tensor : tensors) {
    if (tensor->is_defined()) {
      *tensor = tensor->with_own_shape();
    }
  }
}

void take_shapes(Panels& panels) {
  take_shapes({&panels.data});
  if (panels.scaling) {
    take_shapes({&panels.scaling->scales, &panels.scaling->zeros});
  }
}

void take_shapes(LayerWeights& weights) {
  take_shapes({&weights.attention_norm, &weights.mlp_norm});
  for (LayerLinear* linear : {&weights.qkv, &weights.o, &weights.gate_up, &weights.down}) {
    take_shapes(linear->panels);
    take_shapes({&linear->bias});
  }
}

}  // namespace

int64_t integer_of(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) {
    throw PythonError();
  }
  return value;
}

double number_of(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1 && PyErr_Occurred()) {
    throw PythonError();
  }
  return value;
}

ShortList<int64_t, 8> integers_of(PyObject* object) {
  const Reference tuple(PySequence_Tuple(object));
  const Py_ssize_t count = PyTuple_Size(tuple.get());
  ShortList<int64_t, 8> values;
  for (Py_ssize_t i = 0; i < count; ++i) {
    values.push_back(integer_of(PyTuple_GetItem(tuple.get(), i)));
  }
  return values;
}

DType dtype_of(PyObject* name) {
  const char* text = PyUnicode_AsUTF8AndSize(name, nullptr);
  if (!text) {
    throw PythonError();
  }
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16, DType::float64, DType::float8_e4m3fn, DType::int8,
                            DType::uint8, DType::int32, DType::int64}) {
    if (name_of(dtype).text == text) {
      return dtype;
    }
  }
  throw TypeError(joined({"no weights are of ", text}));
}

Tensor optional_tensor_of(PyObject* object) { return object == Py_None ? Tensor() : tensor_of(object); }

Panels panels_of(PyObject* object) {
  if (!PyTuple_Check(object)) {
    return {tensor_of(object)};
  }
  const Fields fields(object, 6, "QuantizedPanels");
  return {tensor_of(fields[0]), Scaling{tensor_of(fields[1]), optional_tensor_of(fields[2]), integer_of(fields[3]),
                                        integer_of(fields[4]), integer_of(fields[5])}};
}

Tables tables_of(PyObject* object) { return last_tables.value_of(object); }

Segments segments_of(PyObject* object) { return last_segments.value_of(object); }

void forget_tuples() {
  last_tables.forget();
  last_segments.forget();
}

Sequences sequences_of(PyObject* object) {
  const Fields fields(object, 6, "PagedSequences");
  return {tensor_of(fields[0]),  tensor_of(fields[1]),  tensor_of(fields[2]),
          integer_of(fields[3]), integer_of(fields[4]), fields[5] == Py_None ? 0 : integer_of(fields[5])};
}

AttentionOptions attention_options_of(PyObject* object, int64_t head_dim) {
  const Fields fields(object, 5, "AttentionOptions");
  return {fields[0] == Py_None ? std::pow(double(head_dim), -0.5) : number_of(fields[0]), number_of(fields[1]),
          optional_tensor_of(fields[2]), optional_tensor_of(fields[3]), fields[4] == Py_True};
}

std::optional<ExpertAdapters> expert_adapters_of(PyObject* object) {
  if (object == Py_None) {
    return {};
  }
  const Fields fields(object, 5, "ExpertLoRA");
  return ExpertAdapters{tables_of(fields[0]), tensor_of(fields[1]), integer_of(fields[2]), integer_of(fields[3]),
                        integer_of(fields[4])};
}

std::vector<LayerStep> layer_steps_of(PyObject* object) {
  MULTILORA_CHECK_TYPE(PyTuple_Check(object), "expected a tuple of steps, not ", type_name_of(object));
  std::vector<LayerStep> steps;
  for (Py_ssize_t i = 0; i < PyTuple_Size(object); ++i) {
    steps.push_back(layer_step_of(PyTuple_GetItem(object, i)));
  }
  return steps;
}

Decoder decoder_of(PyObject* layers, PyObject* head) {
  MULTILORA_CHECK_TYPE(PyTuple_Check(layers), "expected a tuple of layers, not ", type_name_of(layers));
  Decoder decoder;
  for (Py_ssize_t i = 0; i < PyTuple_Size(layers); ++i) {
    const Fields fields(PyTuple_GetItem(layers, i), 2, "a layer and the place of its step");
    decoder.layers.push_back({layer_weights_of(fields[0]), integer_of(fields[1])});
    take_shapes(decoder.layers.back().weights);
  }
  if (head != Py_None) {
    const Fields fields(head, 4, "PackedHead");
    decoder.head.emplace(Head{tensor_of(fields[0]), number_of(fields[1]), panels_of(fields[2]), integer_of(fields[3])});
    take_shapes({&decoder.head->norm});
    take_shapes(decoder.head->panels);
  }
  return decoder;
}

}  // namespace multilora
