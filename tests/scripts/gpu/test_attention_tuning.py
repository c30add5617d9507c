"""The tuner of attention beside a GPU that is not there: launches are noted, and times are given by the sizes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from gpu import attention_tuning, report
from multilora_kernels.cuda import block_sizes

_GPU = 103
"""An architecture that has no tiles of its own."""


class _FakeMachine(SimpleNamespace):
    """The device whose clock reads what `seconds_of` says of a step and of the sizes that it was launched with."""

    is_dry = False
    device = torch.device("cpu")
    dtype = torch.bfloat16

    def measure(self, steps):
        return {name: self._seconds(step) for name, step in steps.items()}

    def _seconds(self, step):
        step()
        return self.seconds_of(*self.launched[-1])


def _tuned(monkeypatch, tmp_path, launch, seconds_of):
    """The rows of the tuner, with the table that a report with them would write in place."""
    machine = _FakeMachine(launched=[], seconds_of=seconds_of)

    def steps_of(_machine, kernel, steps):
        def launch_of(step):
            def launch_step(sizes):
                machine.launched.append((kernel, step, sizes))
                return launch(kernel, sizes)

            return launch_step

        return {f"{rows} of {keys} keys": launch_of((rows, keys)) for rows, keys in steps}

    monkeypatch.setattr(attention_tuning, "steps_of", steps_of)
    monkeypatch.setattr(attention_tuning, "capability", lambda _device: _GPU)
    rows = list(attention_tuning.tune_attention(machine))
    results = {"tuning": report.PartResult("tuning", rows=[dataclasses.asdict(row) for row in rows])}
    report.write_report(results, "", tmp_path)
    monkeypatch.setattr(block_sizes, "TABLE_PATH", tmp_path / report.TILES.name)
    monkeypatch.setattr(block_sizes, "_table", block_sizes._table.__wrapped__)
    return rows


def test_the_quickest_tiles_of_all_steps_serve_heads_of_their_size_on_their_architecture(tmp_path, monkeypatch):
    before = {
        (operator, head_dim, group, gpu): block_sizes.attention_sizes(operator, "16 bits", group, head_dim, gpu)
        for operator in ("decode_attention", "prompt_attention")
        for head_dim, group, gpu in ((256, 4, _GPU), (128, 32, _GPU), (128, 4, 80))
    }

    def seconds_of(kernel, step, sizes):
        best = {"decode_attention": {"BLOCK_N": 64, "num_stages": 4}, "prompt_attention": {"num_stages": 3}}
        seconds = 1.0 + sum(sizes[name] != size for name, size in best[kernel.operator].items())
        if kernel.operator == "decode_attention":
            # The longest step takes most of the time, and for the others together larger splits are worse.
            ratio, longest = (0.9, 100.0) if step == (8, 32768) else (1.2, 1.0)
            seconds *= longest * (ratio if sizes["SPLIT_KEYS"] > 256 else 1.0) * (1 + 0.1 * (sizes["SPLIT_KEYS"] < 256))
        return seconds * (1 + (sizes["num_warps"] == (8 if kernel.heads.head_dim == 64 else 4)))

    _tuned(monkeypatch, tmp_path, lambda *_: SimpleNamespace(n_spills=0), seconds_of)
    for kind in ("8 bits", "16 bits"):
        found = {
            (operator, head_dim): block_sizes.attention_sizes(operator, kind, 7, head_dim, _GPU)
            for operator in ("decode_attention", "prompt_attention")
            for head_dim in (64, 80, 128)
        }
        for (operator, head_dim), sizes in found.items():
            assert sizes["num_stages"] == (4 if operator == "decode_attention" else 3)
            assert sizes["num_warps"] == (4 if head_dim == 64 else 8)
            assert operator == "prompt_attention" or (sizes["BLOCK_N"], sizes["SPLIT_KEYS"]) == (64, 256)
    for (operator, head_dim, group, gpu), sizes in before.items():
        assert block_sizes.attention_sizes(operator, "16 bits", group, head_dim, gpu) == sizes


def test_tiles_that_spill_or_do_not_compile_are_told_and_not_timed(tmp_path, monkeypatch):
    def launch(_kernel, sizes):
        if sizes["num_stages"] == 3 and sizes["num_warps"] == 8:
            raise OutOfResources(300000, 232448, "shared memory")
        if sizes["num_stages"] == 2:
            raise RuntimeError("PassManager::run failed")
        return SimpleNamespace(n_spills=8 if sizes["BLOCK_N"] == 64 else 0)

    timed = []

    def seconds_of(_kernel, _step, sizes):
        timed.append(sizes)
        return 1.0

    rows = _tuned(monkeypatch, tmp_path, launch, seconds_of)
    refusals = " ".join(row.note for row in rows if row.note.startswith("refused"))
    for reason in ("out of resource: shared memory", "PassManager", "8 registers spill"):
        assert reason in refusals
    assert timed
    assert not [sizes for sizes in timed if sizes["BLOCK_N"] == 64 or sizes["num_stages"] == 2]


def test_where_all_tiles_spill_the_table_stays_as_it_is(monkeypatch, tmp_path):
    rows = _tuned(monkeypatch, tmp_path, lambda *_: SimpleNamespace(n_spills=1), None)
    assert rows
    assert all(row.note.startswith("refused: 1 registers spill") for row in rows)


def test_an_error_that_is_not_of_the_compiler_ends_the_part(tmp_path, monkeypatch):
    def launch(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        _tuned(monkeypatch, tmp_path, launch, None)
