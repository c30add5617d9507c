"""A short soak of the real engine process; and that the soak sees wrong answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.telling_adapters import MAX_RANK, answer, save_checkpoint
from marked_tables import read_cells, read_table
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.life_cycle import LoRAStats, TierStats
from multilora_engine.request import TokenOutput
from multilora_wire.layout import AdapterLayout
from trials import soak_adapters, soak_tiers
from trials.soak_adapters import PAGE, TABLE, Options, Popularity, Soak, soak
from trials.soak_answers import Call, Tally, Versions
from trials.soak_engine import Counts, TierBytes

_ALL = pytest.mark.long(reason="each case starts two engines; the others have every part of this one")


@pytest.mark.parametrize(
    ("has_disk", "is_spanning"),
    [
        pytest.param(False, False, id="sent again"),
        pytest.param(True, True, id="from disk, spanning pages"),
        pytest.param(True, False, id="from disk", marks=_ALL),
        pytest.param(False, True, id="sent again, spanning pages", marks=_ALL),
    ],
)
def test_every_answer_is_of_the_right_adapter_and_version(has_disk: bool, is_spanning: bool) -> None:
    options = Options(400, 60, 16, device_adapters=4, host_adapters=20, has_disk=has_disk, is_spanning=is_spanning)
    tally, counts = soak(options, ["zipf", "uniform"])
    assert tally.wrong == []
    assert tally.counts["right"] > 320
    assert set(tally.errors) <= {"NOT_FOUND", "CANCELLED"}
    assert (tally.counts["evicted, sent again"] == 0) is has_disk
    assert sum(c.loras.host.evictions for c in counts) > 50
    assert (sum(c.loras.disk.hits for c in counts) > 50) is has_disk
    assert sum(c.loras.waits for c in counts) > 50
    assert sum(c.loras.replacements for c in counts) > 0
    for c in counts:
        first, *_, last = c.tiers
        assert (first.device, first.host) == (0, 0)
        assert 0 < last.device <= last.host == c.loras.host.bytes_used
        assert last.host > 0.5 * c.loras.host.bytes_total
        assert first.seconds < last.seconds
    assert counts[0].tiers[0].disk == 0
    assert counts[1].tiers[0].disk == counts[0].loras.disk.bytes_used
    assert (counts[1].tiers[0].disk > 0) is has_disk


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> AdapterLayout:
    return checkpoint_layout(save_checkpoint(tmp_path_factory.mktemp("telling")), MAX_RANK, "float32")


class _ScriptedClient:
    """Answers every request at once with the next of `outputs`."""

    def __init__(self, outputs: list[TokenOutput]) -> None:
        self._outputs = iter(outputs)

    def generate(self, listener: Call, *_: object) -> None:
        listener.on_output(next(self._outputs))


def output(token_ids: list[int], finish_reason: str | None = "length", **fields: str) -> TokenOutput:
    return TokenOutput("r", token_ids, "", finish_reason, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "is_wrong"),
    [
        (output(answer(5, 2)), False),
        (output(answer(5, 1)), False),
        (output(answer(5, 0)), True),
        (output(answer(5, 3)), True),
        (output(answer(6, 2)), True),
        (output(answer(5, 2)[:4]), True),
        (output(answer(5, 2)[:4], "cancelled"), False),
        (output(answer(6, 2)[:4], "cancelled"), True),
        (output(answer(5, 2), lora_digest="of another"), True),
        (output([], None, error_code="UNAVAILABLE"), False),
        (output([], None, error_code="INTERNAL"), True),
        (output([], None, error_code="NOT_FOUND"), True),
    ],
)
def test_a_wrong_answer_is_seen(layout: AdapterLayout, given: TokenOutput, is_wrong: bool) -> None:
    """Adapter 5 has been in version 1 for certain, and version 2 has been submitted. Nothing may get lost."""
    options, tally = Options(1, 1, 1, 1, 1, has_disk=True), Tally()
    versions = Versions(5)
    versions.pack(True, layout)
    versions.pack(True, layout)
    versions.confirm([1])
    versions.pack(True, layout)
    soak = Soak(_ScriptedClient([given]), layout, options, [versions], tally)  # type: ignore[arg-type]
    soak._ask_once([100], versions, "ask", with_weights=False, is_new=False)
    assert bool(tally.wrong) is is_wrong


def test_the_command_writes_its_table_and_fails_where_an_answer_was_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, tally = tmp_path / "page.md", Tally(seconds=[0.1, 0.2])
    page.write_text(PAGE.read_text())
    tally.counts.update({"requests": 51_896, "right": 51_895, "replacements": 7})
    tally.errors["NOT_FOUND"] = 12
    tally.wrong.append("adapter 3 answered [4]")

    first = [TierBytes(100 + second, second << 20, second << 21, second << 30) for second in range(13)]
    second = [TierBytes(113.5, 0, 0, 13 << 30), TierBytes(115, 3 << 18, 1 << 20, 13 << 30)]
    tiers = LoRAStats(TierStats(0, 30 << 20), TierStats(0, 30 << 20), TierStats(0, 16 << 30), 0, 0, 0, 0.0)

    def scripted(options: Options, popularities: list[Popularity], on_done: object) -> tuple[Tally, list[Counts]]:
        return tally, [Counts(1, 0, tiers, first), Counts(1, 0, tiers, second)]

    drawn: list[Path] = []
    monkeypatch.setattr(soak_adapters, "PAGE", page)
    monkeypatch.setattr(soak_adapters, "write_plots", drawn.append)
    monkeypatch.setattr(soak_adapters, "measured_source", lambda: "By a test.")
    monkeypatch.setattr(soak_adapters, "soak", scripted)
    options = {"requests": 1, "adapters": 1, "clients": 1, "device_adapters": 1, "host_adapters": 1, "disk": True}

    with pytest.raises(soak_adapters.typer.Exit) as ended:
        soak_adapters.main(**options, popularity="both", seed=0, spanning=False, update_docs=True)

    assert ended.value.exit_code == 1
    assert "adapter 3 answered [4]" in capsys.readouterr().out
    lines = read_table(page, TABLE).splitlines()
    assert lines[:6] == [
        "|  | count |",
        "| --- | ---: |",
        "| requests | 51,896 |",
        "| right | 51,895 |",
        "| error NOT_FOUND | 12 |",
        "| WRONG | 1 |",
    ]
    assert lines[-2:] == ["", "By a test."]
    rows = [tuple(row.values()) for row in read_cells(page, soak_tiers.TABLE)]
    assert rows == [
        *((f"{s}.0", f"{s} MiB", f"{2 * s} MiB", f"{1024 * s:,} MiB") for s in range(0, 13, 2)),
        ("13.5", "0 MiB", "0 MiB", "13,312 MiB"),
        ("15.0", "0.75 MiB", "1 MiB", "13,312 MiB"),
        ("limit", "30 MiB", "30 MiB", "16,384 MiB"),
    ]
    assert read_table(page, soak_tiers.TABLE).endswith("\n\nBy a test.\n")
    assert drawn == [page]
