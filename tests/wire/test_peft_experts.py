"""Adapters on experts are read alike in every form that trainers write; what does not fit is refused by name."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import save, save_file
from support.expert_adapters import (
    DOWN,
    FORMS,
    GATE,
    GPT_OSS,
    PLAIN,
    PREFIX,
    UNORDERED,
    UP,
    Array,
    Factors,
    Pair,
    all_experts,
    forms_for,
    mixtral,
    mixture_sites,
    numbered,
    numbered_fused,
    random_factors,
    read_factors,
    shared_outer,
    wrapped,
)
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from multilora_wire import peft_files
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.config_sites import config_sites
from multilora_wire.module_names import MOE_ROUTER, SHARED_4H_TO_H, SHARED_EXPERT_GATE, SHARED_H_TO_4H, SHARED_UP
from multilora_wire.peft_config import PeftError
from multilora_wire.peft_files import LinearReader, PeftAdapter, open_peft_directory, read_peft
from multilora_wire.sites import (
    GPT_OSS_EXPERTS,
    PLAIN_EXPERTS,
    ExpertsForm,
    ModelSites,
)
from multilora_wire.tensor_file import MemoryBytes

REFUSALS = (PeftError, WrongBaseModel)
RANK, ALPHA = 3, 6
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "peft_version": "0.21.2"}
Tensors = Mapping[str, Array]


def read(tensors: Tensors, sites: ModelSites | None = PLAIN, **fields: Any) -> PeftAdapter:
    stored = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    return read_peft(json.dumps(CONFIG | fields).encode(), MemoryBytes(save(stored)), sites, "tiny")


def scaled(factors: Factors, scale: float = ALPHA / RANK) -> dict[tuple[int, int, int], Pair]:
    return {place: (a, b * np.float32(scale)) for place, (a, b) in factors.items()}


def assert_equal(found: Factors, expected: Factors) -> None:
    assert found.keys() == expected.keys()
    for place, pair in expected.items():
        for ours, theirs in zip(found[place], pair, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=str(place))


@pytest.mark.parametrize(
    ("sites", "form"),
    [(sites, form) for sites in (PLAIN, GPT_OSS) for form in forms_for(sites)],
    ids=lambda value: value if isinstance(value, str) else f"interleaved {value.experts_form.is_interleaved}",
)
def test_every_form_gives_the_factors_that_it_was_made_of(form: str, sites: ModelSites) -> None:
    factors = random_factors(sites)

    adapter = read(FORMS[form](factors, sites.experts_form), sites)

    assert_equal(read_factors(adapter), scaled(factors))


@settings(max_examples=60)
@given(
    form=st.sampled_from(sorted(FORMS)),
    hidden_size=st.integers(1, 9),
    expert_size=st.integers(1, 9),
    num_experts=st.integers(2, 5),
    rank=st.integers(1, 4),
    experts_form=st.sampled_from([PLAIN_EXPERTS, GPT_OSS_EXPERTS, ExpertsForm(is_transposed=True)]),
    dtype=st.sampled_from([np.float16, np.float32]),
    piece=st.integers(1, 40),
    apart=st.integers(1, 200),
)
def test_every_form_is_read_whatever_its_sizes_and_the_pieces_it_is_read_in(
    form: str,
    hidden_size: int,
    expert_size: int,
    num_experts: int,
    rank: int,
    experts_form: ExpertsForm,
    dtype: type[np.generic],
    piece: int,
    apart: int,
) -> None:
    sites = mixture_sites(hidden_size, expert_size, num_experts, experts_form, num_layers=2)
    assume(form in forms_for(sites))
    factors = random_factors(sites, rank, layers=[1])
    is_exchanged = form == "PEFT, inputs taken for outputs"
    # PEFT 0.18 took the outputs for inputs, where the parameter has the outputs first.
    version = "0.18.1" if is_exchanged != experts_form.is_transposed else "0.19.1"
    is_square = hidden_size in (expert_size, 2 * expert_size)
    if is_exchanged and experts_form.is_transposed and is_square:
        return  # Only PEFT 0.19.0 wrote this.
    tensors = {key: value.astype(dtype) for key, value in FORMS[form](factors, experts_form).items()}

    with patch.multiple(peft_files, MAX_PIECE_VALUES=piece, _MAX_UNMIXED_BYTES=apart):
        adapter = read(tensors, sites, r=rank, lora_alpha=rank, peft_version=version)
        assert_equal(read_factors(adapter), factors)


@pytest.mark.parametrize("is_exchanged", [False, True], ids=["PEFT 0.21", "PEFT 0.18"])
def test_values_lie_where_peft_puts_them(is_exchanged: bool) -> None:
    """Experts follow one another in A and alternate in B; PEFT 0.18 took `[experts, out, in]` for inputs first."""
    width, height = (20, 12) if is_exchanged else (12, 20)
    a = np.arange(4 * 3 * width, dtype=np.float32).reshape(12, width)
    b = -np.arange(4 * 3 * height, dtype=np.float32).reshape(height, 12)
    tensors = {f"{PREFIX}.1.mlp.experts.lora_A.weight": a, f"{PREFIX}.1.mlp.experts.lora_B.weight": b}

    found = read_factors(read(tensors, lora_alpha=3, peft_version="0.18.1" if is_exchanged else "0.21.2"))

    assert found.keys() == {(1, DOWN, expert) for expert in range(4)}
    for (_, _, expert), (our_a, our_b) in found.items():
        for rank in range(3):
            inner, outer = a[expert * 3 + rank], b[:, rank * 4 + expert]
            np.testing.assert_array_equal(our_a[rank], outer if is_exchanged else inner)
            np.testing.assert_array_equal(our_b[:, rank], inner if is_exchanged else outer)
    update = np.einsum(
        "ore,eri->eio" if is_exchanged else "ore,eri->eoi", b.reshape(height, 3, 4), a.reshape(4, 3, width)
    )
    for expert in range(4):
        our_a, our_b = found[1, DOWN, expert]
        np.testing.assert_allclose(our_b @ our_a, update[expert], rtol=1e-6)


@pytest.mark.parametrize("form", sorted(UNORDERED))
def test_a_form_that_does_not_tell_the_order_of_alternating_outputs_is_refused(form: str) -> None:
    """Megatron-Bridge and SGLang have halves in gpt-oss's `experts.gate_up_proj`, vLLM alternates."""
    with pytest.raises(
        PeftError, match=r"lora_B\.weight .*: outputs of gate and up alternate in the gate_up_proj of this"
    ):
        read(FORMS[form](random_factors(GPT_OSS), GPT_OSS_EXPERTS), GPT_OSS)

    down = random_factors(GPT_OSS, modules=[DOWN])
    assert_equal(read_factors(read(FORMS[form](down, GPT_OSS_EXPERTS), GPT_OSS)), scaled(down))


def test_one_matrix_for_all_experts_is_that_of_each() -> None:
    factors = random_factors(PLAIN, has_shared_sides=True)
    stacked, separate = all_experts(factors, PLAIN_EXPERTS), all_experts(factors, PLAIN_EXPERTS, is_fused=False)

    for tensors in (stacked, separate):
        shared = shared_outer(tensors)
        assert sum(value.size for value in shared.values()) < sum(value.size for value in tensors.values())
        assert_equal(read_factors(read(shared)), scaled(factors))


@pytest.mark.parametrize("path", ["experts", "experts.shared"])
def test_one_matrix_for_all_experts_may_stand_beside_one_expert_a_tensor(path: str) -> None:
    factors = random_factors(PLAIN, has_shared_sides=True)
    tensors = dict(numbered(factors))
    for layer in (1, 2):
        for name, side in (("gate_proj", "A"), ("up_proj", "A"), ("down_proj", "B")):
            keys = [f"{PREFIX}.{layer}.mlp.experts.{e}.{name}.lora_{side}.weight" for e in range(4)]
            matrix = [tensors.pop(key) for key in keys][-1]
            key = f"{PREFIX}.{layer}.mlp.{path}.{name}.lora_{side}.weight"
            tensors[key] = matrix if path == "experts.shared" else matrix[np.newaxis]

    assert_equal(read_factors(read(tensors)), scaled(factors))

    # An expert that the other side lacks is absent.
    gone = [key for key in tensors if ".experts.2." in key]
    left = {key: value for key, value in tensors.items() if key not in gone}
    kept = {place: pair for place, pair in factors.items() if place[2] != 2}
    assert gone
    assert_equal(read_factors(read(left)), scaled(kept))


def test_one_adapter_for_all_experts_is_that_of_each() -> None:
    one = random_factors(PLAIN)
    factors = {place: one[place[0], place[1], 0] for place in one}

    tensors = {key: value[:1] for key, value in all_experts(factors, PLAIN_EXPERTS).items()}

    assert_equal(read_factors(read(tensors)), scaled(factors))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "PEFT, inputs taken for outputs"])
@pytest.mark.parametrize("modules", [(GATE, UP), (DOWN,)], ids=["gate and up", "down"])
def test_an_adapter_on_some_linears_of_some_layers_is_read(form: str, modules: tuple[int, ...]) -> None:
    factors = random_factors(PLAIN, layers=[2], modules=modules)

    assert_equal(read_factors(read(FORMS[form](factors, PLAIN_EXPERTS))), scaled(factors))


@pytest.mark.parametrize("name", ["one expert a tensor", "Mixtral's names", "Unsloth"])
def test_an_expert_that_the_file_lacks_is_absent(name: str) -> None:
    factors = {place: pair for place, pair in random_factors(PLAIN).items() if place[2] != 2}

    if name == "Unsloth":
        tensors = FORMS[name](random_factors(PLAIN), PLAIN_EXPERTS)
        tensors = {key: value for key, value in tensors.items() if "projs.2." not in key}
    else:
        tensors = FORMS[name](factors, PLAIN_EXPERTS)

    assert_equal(read_factors(read(tensors)), scaled(factors))


def test_gate_and_up_share_one_matrix_of_the_file() -> None:
    factors = random_factors(PLAIN)
    for form in (wrapped(factors, PLAIN_EXPERTS), all_experts(factors, PLAIN_EXPERTS)):
        adapter = read(form)
        assert adapter.num_bytes == sum(value.nbytes for value in form.values())
        a_of = {(one.layer, one.module_id, one.expert): one.a for one in adapter.linears}
        assert all(a_of[layer, GATE, expert] == a_of[layer, UP, expert] for layer in (1, 2) for expert in range(4))


SQUARE = mixture_sites(hidden_size=12, expert_size=12)
SQUARE_GPT_OSS = mixture_sites(hidden_size=12, expert_size=12, form=GPT_OSS_EXPERTS)


@pytest.mark.parametrize(
    ("version", "sites", "is_exchanged"),
    [
        ("0.17.0", SQUARE, True),
        ("0.18.1", SQUARE, True),
        ("0.18.2.dev0@UNKNOWN", SQUARE, True),
        ("0.19.1", SQUARE, False),
        ("1.0.0", SQUARE, False),
        ("0.17.1", SQUARE_GPT_OSS, False),
        ("0.19.1", SQUARE_GPT_OSS, False),
    ],
)
def test_pefts_version_tells_inputs_from_outputs_where_there_are_as_many(
    version: str, sites: ModelSites, is_exchanged: bool
) -> None:
    factors = random_factors(sites, modules=[DOWN])
    tensors = wrapped(factors, sites.experts_form, is_exchanged)

    assert_equal(read_factors(read(tensors, sites, peft_version=version)), scaled(factors))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"peft_version": None},
            r"as many inputs as outputs, 12; only peft_version .* tells them apart, and it is None",
        ),
        ({"peft_version": "yesterday's"}, 'peft_version .* it is "yesterday\'s"'),
        ({"peft_version": "0.16.0"}, "it is '0.16.0'"),
        ({"peft_version": "0.19.0"}, "'0.19.0', which mistook one for the other. Train the adapter with PEFT 0.19.1"),
        ({"peft_version": "0.19.0.dev0"}, "mistook one for the other"),
    ],
)
def test_a_square_matrix_of_an_unknown_version_is_refused(fields: dict[str, Any], message: str) -> None:
    tensors = wrapped(random_factors(SQUARE, modules=[DOWN]), PLAIN_EXPERTS)

    with pytest.raises(PeftError, match=rf"experts\.lora_A\.weight .*down_proj of the experts here .*{message}"):
        read(tensors, SQUARE, **fields)


def test_a_version_that_contradicts_the_file_is_refused() -> None:
    tensors = wrapped(random_factors(SQUARE), PLAIN_EXPERTS)

    with pytest.raises(PeftError, match=r"'0\.18\.1' .* they are exchanged, unlike those of the file's other experts"):
        read(tensors, SQUARE, peft_version="0.18.1")


ONE = f"{PREFIX}.1.mlp.experts.0.gate_proj"
A_ONE, B_ONE = f"{ONE}.lora_A.weight", f"{ONE}.lora_B.weight"
WRAPPED_A, WRAPPED_B = (f"{PREFIX}.1.mlp.experts.base_layer.lora_{side}.weight" for side in "AB")


def changed(tensors: Tensors, **new: Array) -> dict[str, Array]:
    return dict(tensors) | new


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def renamed(tensors: Tensors, old: str, new: str) -> dict[str, Array]:
    return {key.replace(old, new): value for key, value in tensors.items()}


FACTORS = random_factors(PLAIN, layers=[1])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        # Other numbers of experts.
        (
            wrapped(random_factors(mixture_sites(num_experts=3), layers=[1]), PLAIN_EXPERTS),
            r"base_layer.lora_A.weight \[9, 20\] is not of 4 experts, as many as the model here has",
        ),
        (
            wrapped(random_factors(mixture_sites(num_experts=8), layers=[1]), PLAIN_EXPERTS),
            r"have rank 6 in a model of 4 experts, but adapter_config.json says 3",
        ),
        (
            wrapped(random_factors(mixture_sites(num_experts=8), layers=[1]), PLAIN_EXPERTS, has_dimensions=True),
            r"\[8, 3, 20\] is not of 4 experts",
        ),
        (
            all_experts(random_factors(mixture_sites(num_experts=8), layers=[1]), PLAIN_EXPERTS),
            r"proj.lora_A.weight \[8, 3, \d+\] has 8 experts, and the model here has 4",
        ),
        (renamed(numbered(FACTORS), "experts.3", "experts.4"), "is of expert 4, and the model here has 4 experts"),
        # Other sizes.
        (
            wrapped(random_factors(mixture_sites(hidden_size=10), layers=[1]), PLAIN_EXPERTS),
            r"\[12, 10\] and .*\[24, 12\] fit no linear of the 4 experts here, which have gate_up_proj with 20 "
            "inputs and 24 outputs, down_proj with 12 inputs and 20 outputs",
        ),
        (
            numbered(random_factors(mixture_sites(hidden_size=10), layers=[1])),
            "experts.gate_proj has 10 inputs and 12 outputs there, 20 inputs and 12 outputs here",
        ),
        (
            wrapped(FACTORS, PLAIN_EXPERTS, is_exchanged=True, has_dimensions=True),
            r"\[4, 3, 24\] and .* \[20, 3, 4\] fit no linear",
        ),
        ({A_ONE: zeros(3, 20), B_ONE: zeros(12, 2)}, "of expert 0 have different ranks"),
        ({A_ONE: zeros(2, 20), B_ONE: zeros(12, 2)}, "have rank 2 in a model of 4 experts, but .* says 3"),
        ({WRAPPED_A: zeros(12, 20), WRAPPED_B: zeros(24, 8)}, "have different ranks"),
        (
            {A_ONE.replace("gate_", "gate_up_"): zeros(3, 20), B_ONE.replace("gate_", "gate_up_"): zeros(25, 3)},
            "have 25 outputs",
        ),
        # Tensors that are no matrices of experts.
        ({A_ONE: zeros(3, 20, 1, 1), B_ONE: zeros(12, 3)}, r"\[3, 20, 1, 1\] is not a matrix$"),
        ({A_ONE: zeros(4, 3, 20), B_ONE: zeros(4, 12, 3)}, r"\[4, 3, 20\] is not a matrix$"),
        (
            {A_ONE.replace(".0.", "."): zeros(3), B_ONE.replace(".0.", "."): zeros(12, 3)},
            "or one matrix for each expert$",
        ),
        ({A_ONE: zeros(3, 0), B_ONE: zeros(12, 3)}, r"\[3, 0\] is not a matrix$"),
        ({WRAPPED_A: zeros(12), WRAPPED_B: zeros(24, 12)}, "two forms|are not the matrices"),
        ({WRAPPED_A: zeros(12, 0), WRAPPED_B: zeros(24, 12)}, "are not the matrices of 4 experts"),
        ({A_ONE: zeros(3, 20)}, "experts.0.gate_proj.lora_A.weight has no lora_B beside it"),
        ({B_ONE: zeros(12, 3)}, "has no lora_A beside it"),
        ({WRAPPED_A: zeros(12, 20)}, "has no lora_B beside it"),
        # An expert twice.
        (
            numbered(FACTORS) | all_experts(FACTORS, PLAIN_EXPERTS),
            "both adapt moe_.* of expert 0 in layer 1|has all experts, and .* is one of them",
        ),
        (numbered(FACTORS) | mixtral(FACTORS), "are the same matrix"),
        (
            numbered(FACTORS) | numbered_fused(FACTORS, PLAIN_EXPERTS, unsloth=True),
            "both adapt moe_|are the same matrix",
        ),
        (
            numbered(FACTORS) | all_experts(FACTORS, PLAIN_EXPERTS, is_fused=False),
            "has all experts, and .* is one of them",
        ),
        ({**numbered(FACTORS), **renamed(numbered(FACTORS), "experts.1.", "experts.01.")}, "are the same matrix"),
        (
            wrapped(FACTORS, PLAIN_EXPERTS)
            | renamed(wrapped(random_factors(PLAIN, layers=[1], modules=[GATE, UP]), PLAIN_EXPERTS), "base_layer.", ""),
            "both adapt moe_h_to_4h of expert 0",
        ),
        # Two forms.
        (
            numbered(FACTORS) | wrapped(FACTORS, PLAIN_EXPERTS),
            "are two forms of adapters on experts, and a file has one",
        ),
        (
            wrapped(FACTORS, PLAIN_EXPERTS, has_dimensions=True) | all_experts(FACTORS, PLAIN_EXPERTS),
            "are two forms of adapters on experts",
        ),
        (
            wrapped(FACTORS, PLAIN_EXPERTS)
            | renamed(wrapped(FACTORS, PLAIN_EXPERTS, has_dimensions=True), "layers.1", "layers.2"),
            "are two forms of adapters on experts",
        ),
        # Parts that a layer does not have.
        (
            renamed(numbered(FACTORS), "layers.1.", "layers.0."),
            r"mlp\.experts\.\w+_proj is a linear there, and layer 0 here has q",
        ),
        (
            renamed(wrapped(FACTORS, PLAIN_EXPERTS), "layers.1.", "layers.0."),
            r"mlp\.experts\.\w+_proj is a linear there",
        ),
        (
            renamed(all_experts(FACTORS, PLAIN_EXPERTS), "layers.1.", "layers.7."),
            "is a layer there, and the model here has 3",
        ),
        (
            {
                f"{PREFIX}.1.mlp.gate_up_proj.lora_A.weight": zeros(3, 20),
                f"{PREFIX}.1.mlp.gate_up_proj.lora_B.weight": zeros(24, 3),
            }
            | numbered(FACTORS),
            "mlp.gate_up_proj is a linear there, and layer 1 here has .*experts.gate_proj",
        ),
        (renamed(numbered(FACTORS), ".gate_proj", ".gate"), "mlp.experts.0.gate is a linear there"),
        (
            renamed(wrapped(FACTORS, PLAIN_EXPERTS), "base_layer", "base_layer.base_layer"),
            "base_layer.base_layer is a linear there",
        ),
        (renamed(numbered(FACTORS), "lora_B.weight", "lora_C.weight"), "lora_C.weight is not a LoRA matrix"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tensors: Tensors, message: str) -> None:
    with pytest.raises(REFUSALS, match=message):
        read(tensors)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora is True, and .*experts.* only plain LoRA is supported"),
        ({"use_bdlora": {"nblocks": 2, "target_modules_bd_a": ["q_proj"]}}, "use_bdlora is .* only plain LoRA"),
        ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters is .*, a list of names is expected"),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"]},
            "target_parameters names mlp.experts.gate_up_proj_bias; biases are not supported",
        ),
        (
            {"target_parameters": ["mlp.experts.down_proj"]},
            "target_parameters is .*, which leaves out .*experts.gate_up_proj",
        ),
        (
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
            r"target_modules is \['q_proj'\], which leaves out .*experts.gate_up_proj",
        ),
        ({"target_modules": ["q_proj"]}, "which leaves out model.layers.1.mlp.experts.gate_up_proj"),
        ({"rank_pattern": {"experts.down_proj": 4}}, "have rank 3 in a model of 4 experts, but .* says 4"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PeftError, match=message):
        read(wrapped(FACTORS, PLAIN_EXPERTS), **fields)


def test_patterns_are_fewer_the_more_experts_they_are_matched_with() -> None:
    sites = mixture_sites(num_experts=400, num_layers=11)
    assert sites.num_columns > 12_000
    with pytest.raises(PeftError, match=r"rank_pattern has 900 entries, an adapter of this model [56]\d\d at most"):
        read(numbered(FACTORS), sites, rank_pattern={f"layer{index}": 3 for index in range(900)})


def test_dora_on_experts_is_refused_by_its_tensor() -> None:
    with pytest.raises(PeftError, match=r"experts\.0\.gate_proj\.lora_magnitude_vector: DoRA on experts"):
        read({f"{ONE}.lora_magnitude_vector": zeros(12)}, use_dora=True)


def test_experts_are_not_read_without_the_model() -> None:
    with pytest.raises(
        PeftError, match=r"experts.*without the base model's config.json.*multilora convert --base-model"
    ):
        read(numbered(FACTORS), None)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_parameters": ["mlp.experts.gate_up_proj", "experts.down_proj"]},
        {"target_parameters": ["1.mlp.experts.gate_up_proj", "down_proj"], "target_modules": []},
        {"target_parameters": ["gate_up_proj", "down_proj"], "target_modules": ["q_proj"], "layers_to_transform": [0]},
        {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
        {"target_modules": ["experts", "base_layer"]},
        {"target_modules": "all-linear"},
    ],
)
def test_a_configuration_that_lists_the_experts_is_read(fields: dict[str, Any]) -> None:
    assert_equal(read_factors(read(wrapped(FACTORS, PLAIN_EXPERTS), **fields)), scaled(FACTORS))


ROUTER_NAMES = ["mlp.gate", "mlp.router", "mlp.router.linear", "block_sparse_moe.gate"]


@pytest.mark.parametrize("path", ROUTER_NAMES)
def test_a_router_has_one_place_under_all_its_names(path: str) -> None:
    a, b = np.ones((3, 20), np.float32), np.ones((4, 3), np.float32)
    key = f"{PREFIX}.1.{path}"
    tensors = {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}

    (linear,) = read(tensors).linears

    assert (linear.module_id, linear.layer, linear.name) == (MOE_ROUTER, 1, "model.layers.1.mlp.gate")
    if path != "mlp.gate":
        with pytest.raises(PeftError, match="are the same matrix"):
            read(tensors | renamed(tensors, path, "mlp.gate"))


def test_shared_experts_and_their_gate_have_places_with_and_without_the_model() -> None:
    sizes = {"gate_proj": (20, 28), "up_proj": (20, 28), "down_proj": (28, 20)}
    paths = {f"shared_expert.{name}": size for name, size in sizes.items()} | {
        "shared_expert_gate": (20, 1),
        "gate": (20, 4),
    }
    tensors = {}
    for path, (width, height) in paths.items():
        tensors[f"{PREFIX}.1.mlp.{path}.lora_A.weight"] = np.ones((3, width), np.float32)
        tensors[f"{PREFIX}.1.mlp.{path}.lora_B.weight"] = np.ones((height, 3), np.float32)

    for sites in (PLAIN, None):
        ids = {
            linear.name.removeprefix("model.layers.1.mlp."): linear.module_id for linear in read(tensors, sites).linears
        }
        assert ids == {
            "shared_expert.gate_proj": SHARED_H_TO_4H,
            "shared_expert.up_proj": SHARED_UP,
            "shared_expert.down_proj": SHARED_4H_TO_H,
            "shared_expert_gate": SHARED_EXPERT_GATE,
            "gate": MOE_ROUTER,
        }


class CountedBytes(MemoryBytes):
    """Counts the bytes that are read."""

    num_read = 0

    def read(self, start: int, stop: int) -> memoryview:
        self.num_read += stop - start
        return super().read(start, stop)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("passes", [1, 6])
def test_reading_costs_the_bytes_of_the_file_and_memory_of_a_fixed_size(form: str, passes: int) -> None:
    """Not the bytes times the experts, and not all experts at once."""
    experts_form = PLAIN_EXPERTS if form in UNORDERED else GPT_OSS_EXPERTS
    sites = mixture_sites(hidden_size=1500, expert_size=1100, num_experts=16, form=experts_form, num_layers=2)
    source = CountedBytes(save(dict(FORMS[form](random_factors(sites, layers=[1]), experts_form))))
    adapter = read_peft(json.dumps(CONFIG).encode(), source, sites)
    reader = LinearReader(adapter)
    source.num_read = 0

    apart = 4 * RANK * 1500 * 16 // passes
    with patch.multiple(peft_files, MAX_PIECE_VALUES=2000, _MAX_UNMIXED_BYTES=apart):
        tracemalloc.start()
        for linear in adapter.linears:
            for one in reader.read(linear):
                assert one.values.size <= 2000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    # Gate and up are read apart from tensors that have both.
    assert source.num_read < (1 + passes) * source.num_bytes
    assert peak < apart + 20 * 4 * 2000
    assert source.num_bytes > 1_200_000


def base_model(kind: str) -> tuple[PreTrainedModel, ModelSites]:
    """A model of transformers with random weights, and its sites."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_experts_per_tok": 2,
    }
    match kind:
        case "qwen3":
            sizes = {"intermediate_size": 44, "moe_intermediate_size": 12, "num_experts": 4, "head_dim": 10}
            model: PreTrainedModel = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **sizes, mlp_only_layers=[0]))
        case "qwen2":
            sizes = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 28, "num_experts": 4}
            model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**common, **sizes))
        case "mixtral":
            model = MixtralForCausalLM(MixtralConfig(**common, intermediate_size=12, num_local_experts=4))
        case _:
            size = 32 if kind == "square gpt-oss" else 12
            config = GptOssConfig(**common, intermediate_size=size, num_local_experts=4, head_dim=10)
            model = GptOssForCausalLM(config)
    return model, config_sites(model.config.to_dict())


def deltas(factors: Factors, layer: int, form: ExpertsForm) -> dict[str, Array]:
    """What the factors add to the parameters of a layer's experts."""
    found: dict[str, Array] = {}
    of = {
        m: [pair for (at, one, _), pair in sorted(factors.items()) if (at, one) == (layer, m)] for m in (GATE, UP, DOWN)
    }
    products = {m: np.stack([b @ a for a, b in pairs]) for m, pairs in of.items() if pairs}
    if GATE in products:
        fused = np.stack([products[GATE], products[UP]], axis=2 if form.is_interleaved else 1)
        found["gate_up_proj"] = fused.reshape(len(fused), -1, fused.shape[-1])
    if DOWN in products:
        found["down_proj"] = products[DOWN]
    return {name: delta.transpose(0, 2, 1) if form.is_transposed else delta for name, delta in found.items()}


ALL = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3", {"target_parameters": [*ALL, "mlp.gate.weight"], "target_modules": ["q_proj"]}),
        ("qwen3", {"target_parameters": ["1.mlp.experts.gate_up_proj"], "use_rslora": True}),
        ("qwen3", {"target_parameters": ["mlp.gate.weight"], "rank_pattern": {"gate.weight": 2}}),
        ("qwen2", {"target_parameters": ALL, "target_modules": ["shared_expert.up_proj", "shared_expert_gate"]}),
        (
            "mixtral",
            {"target_parameters": ALL, "rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"gate_up_proj": 5}},
        ),
        ("mixtral", {"target_parameters": ["down_proj"]}),
        ("gpt-oss", {"target_parameters": [*ALL, "mlp.router.weight"]}),
        ("square gpt-oss", {"target_parameters": ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]}),
        ("square gpt-oss", {"target_parameters": ["experts.down_proj"]}),
    ],
)
def test_a_file_of_peft_means_what_peft_adds_to_the_model(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model, sites = base_model(kind)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    config = LoraConfig(**{"target_modules": []} | fields, r=3, lora_alpha=7, init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(tmp_path)

    with open_peft_directory(tmp_path, sites) as adapter:
        factors = read_factors(adapter)
    merged = dict(adapted.merge_and_unload().named_parameters())

    ours = {}
    for layer in (0, 1):
        for name, delta in deltas(factors, layer, sites.experts_form).items():
            ours[f"model.layers.{layer}.mlp.experts.{name}"] = delta
    router = "router" if "gpt-oss" in kind else "gate"
    for (layer, module_id, _), (a, b) in factors.items():
        if module_id not in (GATE, UP, DOWN):
            name = sites.site_at[sites.module_at[layer, module_id].parts[0].column].name
            ours[f"model.{name.replace('mlp.gate', f'mlp.{router}') if module_id == MOE_ROUTER else name}.weight"] = (
                b @ a
            )
    for name, value in merged.items():
        theirs = (value - before[name]).detach().numpy()
        np.testing.assert_allclose(ours.pop(name, np.zeros_like(theirs)), theirs, atol=2e-6, err_msg=name)
    assert not ours


@pytest.mark.parametrize("kind", ["mixtral", "qwen3"])
def test_a_file_of_transformers_4_means_what_peft_makes_of_it_and_saves_again(kind: str, tmp_path: Path) -> None:
    """PEFT joins gate and up then, with the ranks of both, and writes patterns for them."""
    model, sites = base_model(kind)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    layers = [layer for layer in (0, 1) if (layer, GATE) in sites.module_at]
    factors = random_factors(sites, layers=layers)
    # PEFT wants an A of its own for each.
    factors |= {(layer, UP, e): (a[::-1], b) for (layer, module_id, e), (a, b) in factors.items() if module_id == UP}
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    tensors = numbered(factors, names, "block_sparse_moe" if kind == "mixtral" else "mlp")
    old, again = tmp_path / "old", tmp_path / "again"
    old.mkdir()
    (old / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": names}))
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, old / "adapter_model.safetensors")

    adapted = PeftModel.from_pretrained(model, str(old))
    adapted.save_pretrained(again)
    merged = dict(adapted.merge_and_unload().named_parameters())

    for folder, rank in ((old, RANK), (again, 2 * RANK)):
        with open_peft_directory(folder, sites) as adapter:
            assert {one.rank for one in adapter.linears if one.module_id == GATE} == {rank}
            found = read_factors(adapter)
        for layer in layers:
            for name, delta in deltas(found, layer, sites.experts_form).items():
                path = f"model.layers.{layer}.mlp.experts.{name}"
                theirs = (merged[path] - before[path]).detach().numpy()
                np.testing.assert_allclose(delta, theirs, rtol=1e-4, atol=1e-4, err_msg=path)
                assert np.abs(theirs).max() > 1


PATHS = st.sampled_from(
    ["experts", "experts.base_layer", "experts.shared.w2", "experts.w1", "gate", "shared_expert_gate"]
)
NUMBERED = st.builds(
    "experts.{}.{}".format, st.integers(0, 5), st.sampled_from(["gate_proj", "w2", "gate_up_proj", "x"])
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 12, 20, 24, 10**12]), max_size=4)
CHANGES = st.fixed_dictionaries(
    {"index": st.integers(0, 99), "path": st.none() | PATHS | NUMBERED, "shape": st.none() | SHAPES}
)


@settings(max_examples=150)
@given(
    form=st.sampled_from(sorted(FORMS)),
    changes=st.lists(CHANGES, min_size=1, max_size=3),
    kept=st.sets(st.integers(0, 99), max_size=4),
    version=st.sampled_from([None, "0.19.0", "0.18.1"]),
)
def test_whatever_names_and_shapes_a_header_has_the_file_is_read_or_refused(
    form: str, changes: list[dict[str, Any]], kept: set[int], version: str | None
) -> None:
    entries = [(key, list(value.shape)) for key, value in FORMS[form](FACTORS, PLAIN_EXPERTS).items()]
    if kept:
        entries = [entries[index % len(entries)] for index in sorted(kept)]
    for change in changes:
        key, shape = entries[change["index"] % len(entries)]
        if change["path"] is not None:
            key = f"{PREFIX}.1.mlp.{change['path']}.{key[-len('lora_A.weight') :]}"
        entries[change["index"] % len(entries)] = (key, shape if change["shape"] is None else change["shape"])
    header, end = {}, 0
    for key, shape in dict(entries).items():
        start, end = end, end + min(4 * prod(shape), 1 << 20)
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    source = MemoryBytes(len(text).to_bytes(8, "little") + text + bytes(end))
    with suppress(*REFUSALS):
        adapter = read_peft(json.dumps(CONFIG | {"peft_version": version}).encode(), source, PLAIN)
        assert read_factors(adapter)
