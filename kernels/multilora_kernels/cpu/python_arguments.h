// Python's objects as arguments of the operators: numbers, tensors and NamedTuples of both. They raise TypeError for other
// objects, or PythonError.
#pragma once

#include <Python.h>

#include <optional>
#include <vector>

#include "apply.h"
#include "decoder_layers.h"
#include "experts.h"
#include "paged.h"
#include "panels.h"
#include "short_list.h"
#include "torch_process.h"

namespace multilora {

int64_t integer_of(PyObject* object);
double number_of(PyObject* object);
ShortList<int64_t, 8> integers_of(PyObject* object);
// From a name such as "bfloat16".
DType dtype_of(PyObject* name);

// Undefined for None.
Tensor optional_tensor_of(PyObject* object);
// A tensor, or QuantizedPanels.
Panels panels_of(PyObject* object);

// These keep the last tuple, whose tensors must therefore stay as long as they are and where they are.
Tables tables_of(PyObject* object);
Segments segments_of(PyObject* object);
// Lets go of both tuples.
void forget_tuples();
Sequences sequences_of(PyObject* object);
// head_dim: for the scale of options that have none.
AttentionOptions attention_options_of(PyObject* object, int64_t head_dim);
std::vector<LayerStep> layer_steps_of(PyObject* object);
// ExpertLoRA, or None.
std::optional<ExpertAdapters> expert_adapters_of(PyObject* object);
// The tensors of these objects must stay as long as they are and where they are.
Decoder decoder_of(PyObject* layers, PyObject* head);

}  // namespace multilora
