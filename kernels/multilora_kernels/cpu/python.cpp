// The extension module: the operators as functions of plain CPU tensors, and what Python asks about this processor.
#include <Python.h>

#include <chrono>
#include <memory>
#include <new>
#include <tuple>

#include "capability.h"
#include "elementwise.h"
#include "experts.h"
#include "linear.h"
#include "lora_quantize.h"
#include "python_arguments.h"
#include "sample_tokens.h"
#include "torch_process.h"

namespace multilora {
namespace {

// Other threads of Python run while it lives.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  WithGil(const WithGil&) = delete;
  ~WithGil() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

template <class Work>
auto without_gil(const Work& work) {
  const WithoutGil no_gil;
  return work();
}

PyObject* new_reference(PyObject* object) {
  Py_INCREF(object);
  return object;
}

PyObject* pair_of(PyObject* first, PyObject* second) {
  const Reference a(first), b(second);
  return PyTuple_Pack(2, a.get(), b.get());
}

PyObject* pair_of(const std::tuple<Tensor, Tensor>& tensors) {
  const Reference first(to_python(std::get<0>(tensors)));
  return PyTuple_Pack(2, first.get(), Reference(to_python(std::get<1>(tensors))).get());
}

Integers all_of(const ShortList<int64_t, 8>& list) { return {list.data(), list.size()}; }

// token_lora_mapping, max_loras, chunk_size, capacity
PyObject* lora_segments(PyObject* const* arguments) {
  const Tensor mapping = tensor_of(arguments[0]);
  const int64_t max_loras = integer_of(arguments[1]), chunk_size = integer_of(arguments[2]);
  const int64_t capacity = integer_of(arguments[3]);
  const Segments segments = lora_segments(mapping, max_loras, chunk_size, capacity);
  const Reference permutation(to_python(segments.permutation)), start(to_python(segments.chunk_start)),
      length(to_python(segments.chunk_length)), lora_index(to_python(segments.chunk_lora_index));
  return PyTuple_Pack(4, permutation.get(), start.get(), length.get(), lora_index.get());
}

// x, tables, first_slice, num_slices, segments
PyObject* lora_shrink(PyObject* const* arguments) {
  const Tensor x = tensor_of(arguments[0]);
  const Tables tables = tables_of(arguments[1]);
  const int64_t first_slice = integer_of(arguments[2]), num_slices = integer_of(arguments[3]);
  const Segments segments = segments_of(arguments[4]);
  return to_python(without_gil([&] { return lora_shrink(x, first_slice, num_slices, tables, segments); }));
}

// v, y, tables, first_slice, slice_sizes, segments
PyObject* lora_expand(PyObject* const* arguments) {
  const Tensor v = tensor_of(arguments[0]), y = tensor_of(arguments[1]);
  const Tables tables = tables_of(arguments[2]);
  const int64_t first_slice = integer_of(arguments[3]);
  const auto slice_sizes = integers_of(arguments[4]);
  const Segments segments = segments_of(arguments[5]);
  without_gil([&] { lora_expand(v, y, first_slice, all_of(slice_sizes), tables, segments); });
  return new_reference(Py_None);
}

// x, y, tables, first_slice, slice_sizes, segments
PyObject* lora_apply(PyObject* const* arguments) {
  const Tensor x = tensor_of(arguments[0]), y = tensor_of(arguments[1]);
  const Tables tables = tables_of(arguments[2]);
  const int64_t first_slice = integer_of(arguments[3]);
  const auto slice_sizes = integers_of(arguments[4]);
  const Segments segments = segments_of(arguments[5]);
  without_gil([&] { apply(x, y, first_slice, all_of(slice_sizes), tables, segments); });
  return new_reference(Py_None);
}

// x, panels, tables, first_slice, slice_sizes, segments, bias
PyObject* lora_linear(PyObject* const* arguments) {
  const Tensor x = tensor_of(arguments[0]);
  const Panels panels = panels_of(arguments[1]);
  const Tables tables = tables_of(arguments[2]);
  const int64_t first_slice = integer_of(arguments[3]);
  const auto slice_sizes = integers_of(arguments[4]);
  const Segments segments = segments_of(arguments[5]);
  const Tensor bias = optional_tensor_of(arguments[6]);
  return to_python(
      without_gil([&] { return lora_linear(x, panels, first_slice, all_of(slice_sizes), tables, segments, bias); }));
}

// x, panels, out_features, bias
PyObject* packed_linear(PyObject* const* arguments) {
  const Tensor x = tensor_of(arguments[0]), bias = optional_tensor_of(arguments[3]);
  const Panels panels = panels_of(arguments[1]);
  const int64_t out_features = integer_of(arguments[2]);
  return to_python(without_gil([&] { return packed_linear(x, panels, out_features, bias); }));
}

// token_ids, panels, num_embeddings
PyObject* packed_embedding(PyObject* const* arguments) {
  const Tensor token_ids = tensor_of(arguments[0]);
  const Panels panels = panels_of(arguments[1]);
  const int64_t num_embeddings = integer_of(arguments[2]);
  return to_python(without_gil([&] {
    return panels.scaling ? quantized_embedding(token_ids, panels, num_embeddings)
                          : packed_embedding(token_ids, panels.data, num_embeddings);
  }));
}

// logits, top_k, is_normalised
PyObject* route(PyObject* const* arguments) {
  const Tensor logits = tensor_of(arguments[0]);
  const int64_t top_k = integer_of(arguments[1]);
  const bool is_normalised = arguments[2] == Py_True;
  return pair_of(without_gil([&] { return route(logits, top_k, is_normalised); }));
}

// x, expert_ids, weights, num_experts, gate_up's panels and out_features, down's, gate_up_bias, down_bias, clamp_limit, lora
PyObject* expert_mlp(PyObject* const* arguments) {
  const Tensor x = tensor_of(arguments[0]);
  const Routes routes{tensor_of(arguments[1]), tensor_of(arguments[2])};
  const int64_t num_experts = integer_of(arguments[3]);
  const Experts gate_up{panels_of(arguments[4]), num_experts, integer_of(arguments[5])};
  const Experts down{panels_of(arguments[6]), num_experts, integer_of(arguments[7])};
  const Tensor gate_up_bias = optional_tensor_of(arguments[8]), down_bias = optional_tensor_of(arguments[9]);
  const double clamp_limit = number_of(arguments[10]);
  const std::optional<ExpertAdapters> adapters = expert_adapters_of(arguments[11]);
  return to_python(without_gil(
      [&] { return expert_mlp(x, routes, gate_up, down, gate_up_bias, down_bias, clamp_limit, adapters); }));
}

// x, update, weight, eps
PyObject* add_rms_norm(PyObject* const* arguments) {
  const Tensor x = tensor_of(arguments[0]), update = tensor_of(arguments[1]), weight = tensor_of(arguments[2]);
  const double eps = number_of(arguments[3]);
  return pair_of(without_gil([&] { return add_rms_norm(x, update, weight, eps); }));
}

// x, update, weight, bias, eps
PyObject* add_layer_norm(PyObject* const* arguments) {
  const Tensor x = tensor_of(arguments[0]), update = tensor_of(arguments[1]), weight = tensor_of(arguments[2]);
  const Tensor bias = optional_tensor_of(arguments[3]);
  const double eps = number_of(arguments[4]);
  return pair_of(without_gil([&] { return add_layer_norm(x, update, weight, bias, eps); }));
}

// An operator of one tensor: `silu_mul`, `gelu_tanh_mul`, `gelu_tanh` and `gelu`.
using Activation = Tensor (*)(const Tensor&);

template <Activation activation>
PyObject* activated(PyObject* const* arguments) {
  const Tensor x = tensor_of(arguments[0]);
  return to_python(without_gil([&] { return activation(x); }));
}

// q, keys, values, sequences, options
PyObject* paged_attention(PyObject* const* arguments) {
  const Tensor q = tensor_of(arguments[0]), keys = tensor_of(arguments[1]), values = tensor_of(arguments[2]);
  const Sequences sequences = sequences_of(arguments[3]);
  const AttentionOptions options = attention_options_of(arguments[4], head_dim_of(keys));
  return to_python(without_gil([&] { return paged_attention(q, keys, values, sequences, options); }));
}

// qkv, cos, sin, keys, values, slots, sequences, options, is_interleaved
PyObject* rotary_attention(PyObject* const* arguments) {
  const Tensor qkv = tensor_of(arguments[0]), keys = tensor_of(arguments[3]), values = tensor_of(arguments[4]);
  const Angles angles{tensor_of(arguments[1]), tensor_of(arguments[2]), arguments[8] == Py_True};
  const Tensor slots = tensor_of(arguments[5]);
  const Sequences sequences = sequences_of(arguments[6]);
  const AttentionOptions options = attention_options_of(arguments[7], head_dim_of(keys));
  return to_python(without_gil([&] { return rotary_attention(qkv, angles, keys, values, slots, sequences, options); }));
}

constexpr char kDecoderName[] = "multilora.Decoder";

// A decoder, and Python's objects, which keep its tensors.
struct ReadDecoder {
  Decoder decoder;
  Reference layers, head;
};

// layers, head
PyObject* read_decoder(PyObject* const* arguments) {
  std::unique_ptr<ReadDecoder> read(new ReadDecoder{decoder_of(arguments[0], arguments[1]),
                                                    Reference(new_reference(arguments[0])),
                                                    Reference(new_reference(arguments[1]))});
  PyObject* capsule = PyCapsule_New(read.get(), kDecoderName, [](PyObject* object) {
    delete static_cast<ReadDecoder*>(PyCapsule_GetPointer(object, kDecoderName));
  });
  read.release();  // to the capsule, or lost with the error of no memory
  return capsule;
}

const Decoder& decoder_in(PyObject* capsule) {
  const auto* read = static_cast<const ReadDecoder*>(PyCapsule_GetPointer(capsule, kDecoderName));
  if (!read) {
    throw PythonError();
  }
  return read->decoder;
}

// How long after a call of on_layer layers begin without another: a call takes 5 us of a small model's layer of 100.
constexpr std::chrono::milliseconds kCallInterval{10};

// Calls run(step) without Python's lock, for a step of these arguments: steps, keys, values, on_layer.
template <class Run>
auto with_step(PyObject* const* arguments, const Run& run) {
  using Clock = std::chrono::steady_clock;
  auto on_layer = [&, next = Clock::time_point::min()]() mutable {
    const auto now = Clock::now();
    if (now < next) {
      return;
    }
    next = now + kCallInterval;
    const WithGil gil;
    Reference(PyObject_CallNoArgs(arguments[3]));  // by the thread that called this function, whose error stays set
  };
  const DecoderStep step{layer_steps_of(arguments[0]), tensor_of(arguments[1]), tensor_of(arguments[2]), on_layer};
  return without_gil([&] { return run(step); });
}

// decoder, steps, keys, values, on_layer, x, update
PyObject* decoder_layers(PyObject* const* arguments) {
  const Decoder& decoder = decoder_in(arguments[0]);
  if (decoder.layers.empty()) {
    return pair_of(new_reference(arguments[5]), new_reference(arguments[6]));
  }
  const Tensor x = tensor_of(arguments[5]), update = tensor_of(arguments[6]);
  return pair_of(with_step(arguments + 1, [&](const DecoderStep& step) { return decoder_layers(decoder, step, x, update); }));
}

// decoder, steps, keys, values, on_layer, x, rows
PyObject* decoder_logits(PyObject* const* arguments) {
  const Decoder& decoder = decoder_in(arguments[0]);
  const Tensor x = tensor_of(arguments[5]), rows = optional_tensor_of(arguments[6]);
  return to_python(with_step(arguments + 1, [&](const DecoderStep& step) { return decoder_logits(decoder, step, x, rows); }));
}

// logits, parameters
PyObject* sample_tokens(PyObject* const* arguments) {
  const Tensor logits = tensor_of(arguments[0]), parameters = tensor_of(arguments[1]);
  return to_python(without_gil([&] { return sample_tokens(logits, parameters); }));
}

// logits
PyObject* most_probable(PyObject* const* arguments) {
  const Tensor logits = tensor_of(arguments[0]);
  const auto [token_ids, are_sound] = without_gil([&] { return most_probable(logits); });
  return pair_of(to_python(token_ids), PyBool_FromLong(are_sound));
}

// positions, frequencies
PyObject* rotary_angles(PyObject* const* arguments) {
  const Tensor positions = tensor_of(arguments[0]), frequencies = tensor_of(arguments[1]);
  return pair_of(without_gil([&] { return rotary_angles(positions, frequencies); }));
}

// values, the name of the dtype of an arena of codes
using Quantize = Tensor (*)(const Tensor&, DType);

template <Quantize quantize>
PyObject* quantized(PyObject* const* arguments) {
  const Tensor values = tensor_of(arguments[0]);
  const DType arena = dtype_of(arguments[1]);
  return to_python(without_gil([&] { return quantize(values, arena); }));
}

PyObject* capability_name(PyObject* const*) { return PyUnicode_FromString(capability().name); }

PyObject* panel_shape(PyObject* const*) {
  return pair_of(PyLong_FromLongLong(kPanelVectors), PyLong_FromLongLong(capability().panel_width / kPanelVectors));
}

// The name of a dtype, in_features
using UnitFor = const PairUnit* (*)(DType, int64_t);

template <UnitFor unit_for>
PyObject* has_unit(PyObject* const* arguments) {
  return PyBool_FromLong(unit_for(dtype_of(arguments[0]), integer_of(arguments[1])) != nullptr);
}

// The name of the codes' dtype, group_size, in_features
PyObject* has_code_unit(PyObject* const* arguments) {
  const int64_t group_size = integer_of(arguments[1]), in_features = integer_of(arguments[2]);
  return PyBool_FromLong(code_unit_for(dtype_of(arguments[0]), group_size, in_features) != nullptr);
}

// The name of the codes' dtype, group_size, in_features, whether activations may be rounded
PyObject* activation_digits(PyObject* const* arguments) {
  const int64_t group_size = integer_of(arguments[1]), in_features = integer_of(arguments[2]);
  const DigitUnit* unit = digit_unit_for(dtype_of(arguments[0]), group_size, in_features, arguments[3] == Py_True);
  return PyLong_FromLongLong(unit ? unit->digits : 0);
}

// Whether to do so.
PyObject* poison_memory(PyObject* const* arguments) {
  poison_new_tensors(arguments[0] == Py_True);
  return new_reference(Py_None);
}

PyObject* forget_adapters(PyObject* const*) {
  forget_tuples();
  return new_reference(Py_None);
}

using Function = PyObject* (*)(PyObject* const* arguments);

// Calls a function; its C++ errors become Python's.
template <class Work>
PyObject* guarded(const Work& work) {
  try {
    return work();
  } catch (const PythonError&) {
  } catch (const TypeError& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const IndexError& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_SetString(PyExc_MemoryError, "no memory for the results of an operator");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* call(Function function, PyObject* const* arguments, Py_ssize_t count, Py_ssize_t expected) {
  MULTILORA_CHECK_TYPE(count == expected, "expected ", expected, " arguments, not ", count);
  prepare_thread();
  return function(arguments);
}

template <Function function, Py_ssize_t expected>
PyObject* always(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] { return call(function, arguments, count, expected); });
}

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef method(const char* name, FastCall function, const char* help) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, help};
}

template <Function function, Py_ssize_t expected>
PyMethodDef plain(const char* name, const char* help) {
  return method(name, always<function, expected>, help);
}

PyMethodDef methods[] = {
    plain<lora_segments, 4>("lora_segments",
                                   "(token_lora_mapping, max_loras, chunk_size, capacity) -> four fields"),
    plain<lora_shrink, 5>("lora_shrink", "(x, tables, first_slice, num_slices, segments) -> v"),
    plain<lora_expand, 6>("lora_expand", "(v, y, tables, first_slice, slice_sizes, segments) -> None"),
    plain<lora_apply, 6>("lora_apply", "(x, y, tables, first_slice, slice_sizes, segments) -> None"),
    plain<lora_linear, 7>("lora_linear", "(x, panels, tables, first_slice, slice_sizes, segments, bias) -> y"),
    plain<packed_linear, 4>("packed_linear", "(x, panels, out_features, bias) -> y"),
    plain<packed_embedding, 3>("packed_embedding", "(token_ids, panels, num_embeddings) -> the rows"),
    plain<route, 3>("route", "(logits, top_k, is_normalised) -> (expert_ids, weights)"),
    plain<expert_mlp, 12>("expert_mlp",
                          "(x, expert_ids, weights, num_experts, gate_up's panels and out_features, down's panels and "
                          "out_features, gate_up_bias, down_bias, clamp_limit, lora) -> y"),
    plain<add_rms_norm, 4>("add_rms_norm", "(x, update, weight, eps) -> (normed, total)"),
    plain<add_layer_norm, 5>("add_layer_norm", "(x, update, weight, bias, eps) -> (normed, total)"),
    plain<activated<silu_mul>, 1>("silu_mul", "(gate_up) -> the product"),
    plain<activated<gelu_tanh_mul>, 1>("gelu_tanh_mul", "(gate_up) -> the product"),
    plain<activated<gelu_tanh>, 1>("gelu_tanh", "(x) -> the same shape"),
    plain<activated<gelu>, 1>("gelu", "(x) -> the same shape"),
    plain<paged_attention, 5>("paged_attention", "(q, keys, values, sequences, options) -> the heads' outputs"),
    plain<rotary_attention, 9>(
        "rotary_attention",
        "(qkv, cos, sin, keys, values, slots, sequences, options, is_interleaved) -> the heads' outputs"),
    plain<read_decoder, 2>("read_decoder", "(((layer, place of its step), ...), head) -> a decoder"),
    plain<decoder_layers, 7>("decoder_layers",
                                    "(decoder, steps, keys, values, on_layer, x, update) -> (x, update)"),
    plain<decoder_logits, 7>("decoder_logits", "(decoder, steps, keys, values, on_layer, x, rows) -> logits"),
    plain<sample_tokens, 2>("sample_tokens", "(logits, parameters) -> the token ids"),
    plain<most_probable, 1>("most_probable", "(logits) -> (token ids, whether their logits are sound)"),
    plain<rotary_angles, 2>("rotary_angles", "(positions, frequencies) -> (cos, sin)"),

    plain<quantized<quantize_lora_a>, 2>("quantize_lora_a", "(a, name of the arena's dtype) -> its codes"),
    plain<quantized<quantize_lora_b>, 2>("quantize_lora_b", "(b, name of the arena's dtype) -> its codes"),
    plain<capability_name, 0>("capability", "() -> the name of the instruction set that serves this process"),
    plain<panel_shape, 0>("panel_shape", "() -> columns of a panel, and outputs of a column"),
    plain<has_unit<pair_unit_for>, 2>("panels_are_tiles",
                                      "(name of a dtype, in_features) -> whether a matrix unit multiplies them"),
    plain<has_unit<rounding_unit_for>, 2>("rounds_activations",
                                          "(name of a dtype, in_features) -> whether it takes activations of bfloat16"),
    plain<has_code_unit, 3>("rounds_activations_of_codes",
                            "(name of the codes' dtype, group_size, in_features) -> whether it takes activations of bfloat16"),
    plain<activation_digits, 4>("activation_digits",
                                "(name of the codes' dtype, group_size, in_features, may_round) -> digits of activations, or 0"),
    plain<forget_adapters, 0>("forget_adapters", "() -> None; the tables and segments of the last call are let go"),
    plain<poison_memory, 1>("poison_memory", "(bool) -> None; whether memory for results is full of NaN, for tests"),
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "multilora_cpu", nullptr, -1, methods};

}  // namespace
}  // namespace multilora

PyMODINIT_FUNC PyInit_multilora_cpu() {
  return multilora::guarded([] {
    multilora::find_torch();
    return PyModule_Create(&multilora::module);
  });
}
