"""Rotation, writing of the cache and attention in one call, against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import (
    SEQUENCES,
    SHAPES,
    TOLERANCE,
    Case,
    RotaryStep,
    make_case,
    make_rotary_step,
    sequence_fields,
)
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from multilora_kernels import reference, rotary_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def check(case: Case, step: RotaryStep, is_interleaved: bool = False) -> None:
    ours, exact = step.copied(), step.copied(torch.float64)
    actual = rotary_attention(*ours, case.sequences, case.options, is_interleaved)
    expected = reference.rotary_attention(*exact, *sequence_fields(case), is_interleaved)
    tolerance = max(TOLERANCE[step.qkv.dtype], TOLERANCE[step.keys.dtype])
    assert actual.dtype == step.qkv.dtype
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    for cache, expected_cache in zip(ours[3:5], exact[3:5], strict=True):
        torch.testing.assert_close(cache.double(), expected_cache, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_mix_of_sequences_is_turned_stored_and_attended_to(shape, sequences):
    case = make_case(shape, sequences)
    check(case, make_rotary_step(case))


@pytest.mark.parametrize("window", [1, 33, 500])
@pytest.mark.parametrize("sequences", ["decode", "longest decode", "chunks behind a prefix"])
def test_windows_of_a_whole_step(sequences, window):
    case = make_case("default model", sequences, window=window)
    check(case, make_rotary_step(case))


@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "sequences"), [("default model", "decode"), ("odd head_dim", "prefill")])
def test_every_dtype_of_heads_and_cache(shape, sequences, dtype, kv_dtype):
    case = make_case(shape, sequences, dtype, kv_dtype)
    check(case, make_rotary_step(case, dtype))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 2, 6, 32, 64])
@pytest.mark.parametrize(("shape", "sequences"), [("default model", "decode"), ("no vector's multiple", "prefill")])
def test_heads_of_which_a_part_is_turned(shape, sequences, rotary_dim, is_interleaved):
    case = make_case(shape, sequences)
    check(case, make_rotary_step(case, rotary_dim=rotary_dim), is_interleaved)


@pytest.mark.parametrize("sequences", ["decode", "prefill"])
def test_options_of_a_whole_step(sequences):
    case = make_case("odd head_dim", sequences, options="all")
    check(case, make_rotary_step(case))


def test_neighbours_of_a_part_of_a_head_are_turned_as_transformers_turns_them():
    case = make_case(sequences="prefill")
    step = make_rotary_step(case, rotary_dim=32)
    cos, sin = (angles[:, 0, 16:].clone() for angles in (step.cos, step.sin))
    step.cos.copy_(cos.repeat_interleave(2, -1)[:, None])
    step.sin.copy_(torch.stack((-sin, sin), -1).flatten(-2)[:, None])
    ours, (num_q, num_kv) = step.copied(), (case.q.shape[1], case.keys.shape[1])
    rotary_attention(*ours, case.sequences, is_interleaved=True)
    k = step.qkv.view(len(step.slots), -1, case.q.shape[2])[:, num_q : num_q + num_kv].transpose(0, 1)[None]
    expected, _ = modeling_glm4.apply_rotary_pos_emb(k, k, *(torch.cat((x, x), -1)[None] for x in (cos, sin)))
    torch.testing.assert_close(ours[3][step.slots], expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_heads_are_turned_as_transformers_turns_them():
    case = make_case(sequences="prefill")
    step = make_rotary_step(case)
    ours = step.copied()
    rotary_attention(*ours, case.sequences)
    (num_q, num_kv), head_dim = (case.q.shape[1], case.keys.shape[1]), case.q.shape[2]
    heads = step.qkv.view(len(step.slots), -1, head_dim)
    k = heads[:, num_q : num_q + num_kv].transpose(0, 1)[None]
    # transformers negates the second half of the heads, where the first half of our sines is negated.
    sin = step.sin[None, :, 0, head_dim // 2 :].repeat(1, 1, 2)
    turned, _ = apply_rotary_pos_emb(k, k, step.cos[None, :, 0], sin)
    torch.testing.assert_close(ours[3][step.slots], turned[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert torch.equal(ours[4][step.slots], heads[:, num_q + num_kv :])


@pytest.mark.parametrize("sequences", SEQUENCES)
def test_the_number_of_threads_does_not_change_a_bit_of_a_step(sequences):
    case, threads, results = make_case(sequences=sequences), torch.get_num_threads(), []
    step = make_rotary_step(case)
    for n in (1, 2, 4):
        torch.set_num_threads(n)
        tensors = step.copied()
        results.append((rotary_attention(*tensors, case.sequences), *tensors[3:5]))
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(results[0][1:], other[1:], strict=True))


def test_a_slot_outside_the_cache_is_refused_and_not_written():
    case = make_case()
    step = make_rotary_step(case)
    step.slots[1] = len(step.keys)
    with pytest.raises(RuntimeError, match=f"slot {len(step.keys)} is none of {len(step.keys)}"):
        rotary_attention(*step.copied(), case.sequences)
