"""The angles of rotary embeddings against float64."""

from __future__ import annotations

import pytest
import torch

from multilora_kernels import load_cpu_kernels, rotary_angles

POSITIONS = [0, 1, 2, 777, 4096, 131_071, 1_048_576]
LAST_BITS = 2.0**-23
"""Two units in the last place of numbers just below 1."""


def _frequencies(size: int) -> torch.Tensor:
    return 10_000.0 ** -(torch.arange(size, dtype=torch.float32) / size) * (-1.0) ** torch.arange(size)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("size", [64, 37, 1, 0])
@pytest.mark.parametrize("num_tokens", [1, 7, 300, 0])
def test_angles_are_those_of_the_rounded_products(size, num_tokens):
    assert load_cpu_kernels()
    positions = torch.tensor(POSITIONS).repeat(50)[:num_tokens]
    cos, sin = rotary_angles(positions, frequencies := _frequencies(size))
    angles = (positions[:, None, None] * frequencies).double()
    for found, exact in ((cos, angles.cos()), (sin, angles.sin())):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=LAST_BITS)


def test_angles_of_a_token_do_not_depend_on_the_others_nor_on_threads():
    positions, frequencies = torch.arange(700), _frequencies(64)
    together = [rotary_angles(positions, frequencies)]
    threads = torch.get_num_threads()
    for n in (1, 3):
        torch.set_num_threads(n)
        together.append(rotary_angles(positions, frequencies))
    torch.set_num_threads(threads)
    alone = [
        torch.cat(parts) for parts in zip(*(rotary_angles(p, frequencies) for p in positions[:, None]), strict=True)
    ]
    for parts in together:
        assert all(torch.equal(*pair) for pair in zip(parts, alone, strict=True))


def test_pytorch_gives_the_same_angles_where_nothing_is_compiled(monkeypatch):
    positions, frequencies = torch.tensor(POSITIONS), _frequencies(64)
    compiled = rotary_angles(positions, frequencies)
    monkeypatch.setattr("multilora_kernels.cpu._library", lambda: None)
    for found, expected in zip(rotary_angles(positions, frequencies), compiled, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=LAST_BITS)


def test_other_positions_and_frequencies_are_refused():
    positions, frequencies = torch.tensor(POSITIONS), _frequencies(8)
    for wrong in ((positions.int(), frequencies), (positions[None], frequencies), (positions, frequencies.double())):
        with pytest.raises(RuntimeError, match="positions must be int64"):
            rotary_angles(*wrong)
