"""The GPU operators in Triton's interpreter: their arithmetic and masks, without a GPU.

In a process of its own, since Triton looks at the variable when it is imported. Not run there: that a token's bits do
not depend on the batch, which numpy's matrix product, standing in for the tensor cores, does not promise.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from multilora_kernels import interpreter

_FOLDER = Path(__file__).parent
_ALL = """interpreter-7- or interpreter-10-zipf or interpreter-133-skewed or every_rank or every_hidden_size
    or every_slice_width or every_dtype or share_one_a or magnitude or keep_their_bits or wider_tensor or test_cuda
    or elementwise"""
_PAIRS = """dtype0-lora_dtype0 or dtype1-lora_dtype2 or dtype2-lora_dtype1 or dtype0-lora_dtype3 or dtype2-lora_dtype4
    or dtype1-lora_dtype5"""
_SHORT = f"""({_ALL}) and not longest and not skewed and not past_the_dispatcher and not codes
     and not (every_dtype and lora_dtype and not ({_PAIRS}))
     and not (every_option and (long or chunks) and (scale or softcap or sinks or distances))
     and not (every_shape and prefill and not odd)
     and not (every_window and chunks and not 33)
     and not (whoever_shares and chunks)
     and not (every_dtype and prefill and not dtype1)
     and not (segments_in_one_launch and (300 or 515))
     and not (8_bit_rows and (default or llama or long or dtype1 or prefill))
     and not (rows_by_themselves and not (shape1- or shape6 or shape9 or shape11))
     and not (alone_and_among_128 and (dtype1 or dtype2))
     and not (rows_with_their_activation and not ((shape1- or shape5) and silu or shape4 and gelu))
     and not (chunks_with_their_activation and (512 or 150 or 133))
     and not (alone_and_among_others and not dtype0)
     and not (order_of_a_gpu and dtype1)
     and not (part_is_turned and prefill and not (6 and True) and not (2 and False))"""


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(_SHORT, id="short"),
        pytest.param(_ALL, id="all", marks=pytest.mark.long(reason="the interpreter takes seconds a case")),
    ],
)
def test_the_gpu_operators_pass_the_same_tests_in_the_interpreter(cases):
    names = ("test_shrink.py", "test_expand.py", "test_elementwise.py", "test_cuda.py")
    _run(cases, names, {"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            "some_blocks and usual or in_question or batch or no_numbers or penalties or forbidden", id="short"
        ),
        pytest.param("", id="all", marks=pytest.mark.long(reason="the interpreter takes seconds a case")),
    ],
)
def test_sampling_on_a_device_gives_the_tokens_of_the_cpu(cases):
    _run(cases, ["test_cuda_sampling.py"], {"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            """few_rows and (shape2 or shape5) or dtype0 and every_dtype or shape1 and bit_for_bit or 129
            or splits and 40 and shape1 and kind1""",
            id="short",
        ),
        pytest.param("", id="all", marks=pytest.mark.long(reason="the interpreter takes seconds a case")),
    ],
)
def test_products_with_codes_on_a_device_are_those_of_float64(cases):
    _run(cases, ["test_cuda_quantized.py"], {"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            """7-3 or no_numbers or any_number and 11-lora_dtype1-True or every_shape and 31 or 24-kind0
            or 16_bits and (kind1 or kind2 or kind3)""",
            id="short",
        ),
        pytest.param("", id="all", marks=pytest.mark.long(reason="the interpreter takes seconds a case")),
    ],
)
def test_mixtures_of_experts_on_a_device_are_those_of_float64(cases):
    _run(cases, ["test_experts.py"], interpreter.ENVIRONMENT)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param("lacks_one or plain_operators or load_tells or kind_of_step and not turns_all", id="short"),
        pytest.param("", id="all", marks=pytest.mark.long(reason="the interpreter takes seconds a case")),
    ],
)
def test_the_self_test_finds_faults_where_gpu_operators_serve_cpu_tensors(cases):
    _run(cases, ["test_self_test.py"], interpreter.ENVIRONMENT)


def _run(cases: str, names: Iterable[str], environment: Mapping[str, str]) -> None:
    tests = [str(_FOLDER / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-k", " ".join(cases.split()), *tests]
    subprocess.run(command, env=os.environ | environment, check=True)
