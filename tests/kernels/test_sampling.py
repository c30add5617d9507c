"""sample_tokens against sorting and inverting the distribution in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.logits import logits_of

from multilora_kernels import SamplingRule, load_cpu_kernels, most_probable, sample_tokens

TOLERANCE = 3e-5
"""Of probabilities before anything is left out: weights are float32."""


def _sample(logits: torch.Tensor, rules: list[SamplingRule]) -> list[int]:
    assert load_cpu_kernels()
    token_ids = sample_tokens(logits, rules)
    assert token_ids is not None
    return token_ids.tolist()  # type: ignore[no-any-return]


def _left(logits: torch.Tensor, rule: SamplingRule, slack: float) -> torch.Tensor:
    """Which tokens the rule leaves; with some slack, those that it may leave, since weights are float32."""
    ordered, token_ids = (logits.double() / rule.temperature).softmax(-1).sort(descending=True, stable=True)
    top_k = min(rule.top_k or len(ordered), len(ordered))
    least = ordered[top_k - 1]
    nearly_least = (ordered < least) & (ordered > least * (1 - slack))
    among = ordered * ((torch.arange(len(ordered)) < top_k) | nearly_least)
    among /= among.sum()
    is_left = (among > 0) & (among.cumsum(0) - among < rule.top_p + slack)
    is_left &= among >= rule.min_p * (1 - slack) * among[0]
    is_left[0] = True
    return torch.zeros(len(ordered), dtype=torch.bool).scatter_(0, token_ids, is_left)


def _assert_right(token_id: int, logits: torch.Tensor, rule: SamplingRule) -> None:
    assert 0 <= token_id < len(logits)
    assert _left(logits, rule, TOLERANCE)[token_id], (token_id, rule)
    # What is drawn lies between the draws of the narrower and the wider choice.
    starts, ends, weights = [], [], []
    probabilities = (logits.double() / rule.temperature).softmax(-1)
    for slack in (-TOLERANCE, TOLERANCE):
        left = probabilities * _left(logits, rule, slack)
        ends.append(left.cumsum(0)[token_id] / left.sum())
        starts.append(ends[-1] - left[token_id] / left.sum())
        weights.append(left.sum())
    tolerance = TOLERANCE / min(weights)
    assert min(starts) - tolerance <= rule.uniform <= max(ends) + tolerance, (token_id, rule, starts, ends)


uniforms = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53])
rules = st.builds(
    SamplingRule,
    temperature=st.sampled_from([0.05, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 50, 200, 5000, 10**6]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    uniform=uniforms,
)


@given(
    kind=st.sampled_from(["even", "flat", "usual", "peaked", "tied", "few"]),
    vocab=st.sampled_from([1, 2, 15, 37, 1000, 1023, 1024, 1025, 4099, 50_257]),
    chosen=st.lists(rules, min_size=1, max_size=5),
    seed=st.integers(0, 3),
)
def test_sampling_follows_the_rule_of_each_row(kind, vocab, chosen, seed):
    logits = logits_of(kind, len(chosen), vocab, seed)
    for token_id, row, rule in zip(_sample(logits, chosen), logits, chosen, strict=True):
        if rule.top_k == 1:
            assert token_id == row.argmax()
        else:
            _assert_right(token_id, row, rule)


@pytest.mark.parametrize("top_k", [2, 40, 129, 1000])
def test_sampling_takes_of_equally_probable_tokens_the_first(top_k):
    logits = logits_of("even", 1, 5000).repeat(3, 1)
    rules = [SamplingRule(1.0, top_k, 1.0, 0.0, uniform) for uniform in (0.0, 0.5, 1 - 2**-53)]
    assert _sample(logits, rules) == [0, top_k // 2, top_k - 1]
    half = [SamplingRule(1.0, 2 * top_k, 0.5, 0.0, uniform) for uniform in (0.0, 1 - 2**-53)]
    assert _sample(logits[:2], half) == [0, top_k - 1]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("vocab", [37, 4096, 49_152])
def test_sampling_of_a_row_does_not_depend_on_who_else_is_there_nor_on_threads(vocab):
    kinds = ["even", "flat", "usual", "peaked", "tied", "few"]
    logits = torch.cat([logits_of(kind, 4, vocab) for kind in kinds])
    rules = [
        SamplingRule(0.5 + row % 3, row % 4 * 30, 0.8 + row % 5 * 0.05, 0.01 * (row % 2), row / len(logits))
        for row in range(len(logits))
    ]
    alone = [_sample(logits[row : row + 1], rules[row : row + 1])[0] for row in range(len(logits))]
    threads = torch.get_num_threads()
    together = []
    for n in (1, 2, 3, 7):
        torch.set_num_threads(n)
        together.append(_sample(logits, rules))
    torch.set_num_threads(threads)
    assert together == [alone] * len(together)


def test_sampling_where_nothing_is_allowed_gives_a_token_that_is_not():
    logits = torch.stack((torch.full((300,), -torch.inf), torch.zeros(300)))
    rules = [SamplingRule(1.0, 0, 0.9, 0.0, 0.99)] * 2
    forbidden, free = _sample(logits, rules)
    assert 0 <= forbidden < 300
    assert free == 267


def test_sampling_of_logits_that_are_no_numbers_stays_within_the_vocabulary():
    logits = logits_of("usual", 4, 1500)
    logits[0] = torch.nan
    logits[1, 700] = torch.nan
    logits[2, 1499] = torch.inf
    rules = [SamplingRule(1.0, 0, 0.9, 0.0, 0.99)] * 4
    assert all(0 <= token_id < 1500 for token_id in _sample(logits, rules))


def test_sampling_reads_rows_that_lie_apart_and_refuses_what_is_no_row_each():
    logits = logits_of("usual", 6, 1100)
    rules = [SamplingRule(1.0, 0, 1.0, 0.0, 0.3)] * 3
    assert _sample(logits[::2], rules) == _sample(logits[::2].contiguous(), rules)
    for wrong in (logits[:3].double(), logits[:2], logits[:3].T, logits[0]):
        with pytest.raises(RuntimeError, match="must be float"):
            sample_tokens(wrong, rules)


@pytest.mark.usefixtures("poisoned_memory")
@given(
    kind=st.sampled_from(["even", "flat", "usual", "tied"]),
    vocab=st.sampled_from([1, 2, 7, 8, 37, 1023, 1024, 1025, 2051, 50_257]),
    strange=st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 50_256), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0])
        ),
        max_size=4,
    ),
    seed=st.integers(0, 3),
)
def test_the_most_probable_tokens_are_those_of_torch_and_told_to_be_unsound_if_any_is(kind, vocab, strange, seed):
    assert load_cpu_kernels()
    logits = logits_of(kind, 3, vocab, seed)
    for row, token_id, value in strange:
        logits[row, token_id % vocab] = value
    wide = torch.full((3, vocab + 5), math.nan)
    wide[:, :vocab] = logits
    expected = logits.argmax(-1)
    chosen = logits.gather(1, expected[:, None])
    are_sound = bool(chosen.isfinite().all() and chosen.all())
    for given_logits in (logits, wide[:, :vocab]):
        token_ids, are_said_to_be = most_probable(given_logits)
        assert torch.equal(token_ids, expected)
        assert are_said_to_be is are_sound


@pytest.mark.parametrize("logits", [torch.full((2, 1500), -math.inf), torch.zeros(2, 1500)], ids=["forbidden", "zeros"])
def test_of_equally_probable_tokens_the_first_is_the_most_probable_one(logits):
    token_ids, are_sound = most_probable(logits)
    assert (token_ids.tolist(), are_sound) == ([0, 0], False)


def test_the_most_probable_tokens_of_no_rows_are_none():
    token_ids, are_sound = most_probable(torch.empty(0, 100))
    assert (token_ids.shape, token_ids.dtype, are_sound) == ((0,), torch.int64, True)


def test_numpy_finds_the_most_probable_tokens_where_nothing_is_compiled(monkeypatch):
    logits = logits_of("usual", 5, 1000)
    expected, are_sound = most_probable(logits)
    monkeypatch.setattr("multilora_kernels.cpu._library", lambda: None)
    token_ids, are_said_to_be = most_probable(logits)
    assert torch.equal(token_ids, expected)
    assert are_said_to_be is are_sound is True


def test_logits_of_another_kind_are_refused():
    for logits in (torch.zeros(3), torch.zeros(2, 3).double(), torch.zeros(3, 2).T, torch.zeros(2, 0)):
        with pytest.raises(RuntimeError, match="logits must be float32"):
            most_probable(logits)
