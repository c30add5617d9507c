"""The device's tokens are the CPU kernel's, one by one; collected on a GPU and in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from support.logits import logits_of

from multilora_kernels import (
    SamplingRule,
    cuda,
    load_cpu_kernels,
    penalties_reference,
    sample_tokens,
    sampling_reference,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_LARGEST_UNIFORM = 1 - 2**-53
_KINDS = [
    SamplingRule(0.8, 0, 1.0, 0.0, 0.31),
    SamplingRule(1.0, 1, 1.0, 0.0, 0.9),
    SamplingRule(1.3, 20, 1.0, 0.0, 0.77),
    SamplingRule(0.7, 0, 0.9, 0.0, _LARGEST_UNIFORM),
    SamplingRule(1.0, 10**6, 0.5, 0.01, 0.6),
    SamplingRule(2.5, 700, 0.95, 0.0, 0.998),
    SamplingRule(1.0, 0, 0.0, 0.0, _LARGEST_UNIFORM),
    SamplingRule(1.0, 50, 1.0, 1.0, 0.5),
    SamplingRule(1e-6, 0, 1.0, 0.0, 0.2),
    SamplingRule(0.05, 129, 0.999, 0.3, 0.0),
]


def _parameters(rules: list[SamplingRule]) -> torch.Tensor:
    return torch.tensor(rules, dtype=torch.float64).view(-1, 5)


def _on_device(logits: torch.Tensor, rules: list[SamplingRule]) -> list[int]:
    return cuda.sample_tokens(logits.to(DEVICE), _parameters(rules).to(DEVICE)).tolist()  # type: ignore[no-any-return]


def _check(kind: str, vocab: int, rules: list[SamplingRule]) -> None:
    logits = logits_of(kind, len(rules), vocab, seed=vocab)
    assert load_cpu_kernels()
    expected = sample_tokens(logits, rules).tolist()
    assert _on_device(logits, rules) == expected
    assert sampling_reference.sample_tokens(logits, _parameters(rules)).tolist() == expected


@pytest.mark.parametrize("kind", ["even", "usual", "peaked", "tied", "low", "few"])
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 2047, 2048, 2049, 5003, 50_257])
def test_every_rule_over_logits_of_every_kind(kind, vocab):
    _check(kind, vocab, _KINDS)


@pytest.mark.parametrize("kind", ["usual", "tied"])
def test_every_rule_over_some_blocks(kind):
    _check(kind, 4500, _KINDS)


@pytest.mark.parametrize("kind", ["even", "low", "few"])
def test_logits_of_special_kinds(kind):
    _check(kind, 2100, _KINDS[2:6])


@pytest.mark.parametrize("rule", [SamplingRule(1.0, 900, 1.0, 0.0, 0.999), SamplingRule(1.0, 0, 0.4, 0.0, 0.999)])
def test_tokens_in_question_fill_a_block_nearly_exactly_and_not_quite(rule):
    logits = torch.full((4, 4500), -30.0)
    generator = torch.Generator().manual_seed(5)
    for row, num_tokens in enumerate((2047, 2048, 2049, 2048)):
        places = torch.randperm(4500, generator=generator)[:num_tokens]
        logits[row, places] = -2.5 * torch.rand(num_tokens, generator=generator)
    logits[3] = (logits[3] * 64).round() / 64  # many are equal
    expected = sample_tokens(logits, [rule] * 4).tolist()
    assert _on_device(logits, [rule] * 4) == expected
    assert sampling_reference.sample_tokens(logits, _parameters([rule] * 4)).tolist() == expected


def test_a_token_depends_neither_on_its_place_in_the_batch_nor_on_its_neighbours():
    rules = _KINDS[:4]
    logits = logits_of("usual", len(rules), 700)
    together = _on_device(logits, rules)
    order = torch.randperm(len(rules), generator=torch.Generator().manual_seed(3)).tolist()
    assert _on_device(logits[order], [rules[row] for row in order]) == [together[row] for row in order]
    assert [_on_device(logits[row : row + 1], [rules[row]])[0] for row in (0, 3)] == [together[0], together[3]]
    padded = torch.full((2 * len(logits), 711), torch.nan)
    padded[::2, :700] = logits
    assert _on_device(padded[::2, :700], rules) == together


def test_rows_that_are_no_numbers_or_forbid_everything_give_a_token_of_the_vocabulary():
    logits = logits_of("usual", 5, 300)
    logits[0] = -torch.inf
    logits[1, 7] = torch.nan
    logits[2, 9] = torch.inf
    logits[3] = torch.nan
    logits[4, 0], logits[4, 1:] = 0.0, -0.0
    rule = SamplingRule(1.0, 0, 0.9, 0.0, 0.0)
    assert _on_device(logits, [rule] * 5) == [0, 7, 9, 0, 0]
    assert _on_device(logits[:0], []) == []


def test_what_is_no_row_each_with_a_rule_is_refused_for_no_numbers_are_read():
    logits = logits_of("usual", 3, 300)
    for wrong in (logits.double(), logits[:2], logits.T, logits[0]):
        with pytest.raises(RuntimeError, match="must be float"):
            cuda.sample_tokens(wrong, _parameters(_KINDS[:3]))


_PENALTIES = [
    (1.0, 0.0, 0.0),
    (1.3, 0.0, 0.0),
    (0.7, 0.4, 0.1),
    (1e-38, 3e38, 0.0),
    (1.0, -0.3, 0.0),
    (1.0, 0.0, 1 / 3),
]
"""Repetition, presence, frequency."""


@pytest.mark.parametrize("vocab", [7, 1000, 2100])
def test_penalties_by_counts_on_the_device_are_those_of_the_reference_bit_for_bit(vocab):
    generator = torch.Generator().manual_seed(vocab)
    rows = len(_PENALTIES) + 2
    logits = logits_of("usual", rows, vocab, seed=1)
    logits[1, ::3], logits[2, 4], logits[3, 5] = 0.0, torch.nan, -torch.inf
    # A place more than there are rows, whose counts stay as they are.
    counts = torch.randint(0, 9, (rows + 1, vocab), generator=generator, dtype=torch.int32)
    counts[:, vocab // 2 :] = 0
    order = torch.randperm(rows, generator=generator)[: len(_PENALTIES)]
    places = torch.stack([order, order.flip(0) + 1, torch.arange(len(order)) % 2])
    last_token_ids = torch.randint(0, vocab, (rows,), generator=generator)
    penalties = torch.tensor(_PENALTIES, dtype=torch.float64)
    wide = torch.full((rows, vocab + 11), torch.nan, device=DEVICE)
    on_device, counts_on_device = wide[:, :vocab].copy_(logits), counts.clone().to(DEVICE)
    others = [tensor.to(DEVICE) for tensor in (places, last_token_ids, penalties)]
    cuda.penalise_tokens(on_device, counts_on_device, *others)
    penalties_reference.penalise_tokens(logits, counts, places, last_token_ids, penalties)
    assert torch.equal(counts_on_device.cpu(), counts)
    # Which of its bits a NaN has is nobody's definition; a GPU has others than a CPU.
    is_number = ~logits.isnan()
    assert torch.equal(on_device.cpu().isnan(), ~is_number)
    assert torch.equal(on_device.cpu().view(torch.int32)[is_number], logits.view(torch.int32)[is_number])
    assert wide[:, vocab:].isnan().all()


def test_tokens_are_forbidden_always_or_after_a_last_token_alone():
    logits, last_token_ids = torch.zeros(3, 300), torch.tensor([7, 8, 9])
    bans = torch.tensor(
        [(0, 5, -1), (0, 6, 8), (1, 6, 8), (1, 6, 7), (2, 299, 9), (2, 299, 9), (2, 1, 7)]
    ).T.contiguous()
    many = torch.stack([torch.full((200,), 1), torch.arange(100, 300), torch.full((200,), 8)])
    bans = torch.cat((bans, many), dim=1)
    on_device = logits.clone().to(DEVICE)
    cuda.forbid_tokens(on_device, bans.to(DEVICE), last_token_ids.to(DEVICE))
    expected = {(0, 5), (1, 6), (2, 299), *((1, token_id) for token_id in range(100, 300))}
    assert {*map(tuple, (on_device.cpu() == -torch.inf).nonzero().tolist())} == expected
    assert int((on_device != 0).sum()) == len(expected)
    penalties_reference.forbid_tokens(logits, bans, last_token_ids)
    assert torch.equal(on_device.cpu(), logits)
