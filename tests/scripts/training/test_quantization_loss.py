"""The table of what rounding costs has a row for the float weights and for each way, measured on its own checkpoint."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from support.tiny_tokenizer import save_tiny_tokenizer
from tokenizers import Tokenizer, pre_tokenizers

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from marked_tables import read_cells, read_table
from multilora_engine.quantize import dequantized_weights
from training import quantization_loss
from training.quantization_loss import PAGE, TABLE, WAYS, Loss, loss_table, losses


def split_words(tokenizer: Path) -> None:
    """Have a tokenizer of words find them between spaces."""
    backend = Tokenizer.from_file(str(tokenizer))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tokenizer))


@pytest.mark.long(reason="quantises a tiny model five times, and takes its perplexity ten times")
def test_each_way_is_measured_on_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_tokenizer(save_tiny_llama(tmp_path / "model", hidden_size=128, intermediate_size=192))
    split_words(model / "tokenizer.json")
    words = [f"w{number}" for number in Random(3).choices(range(VOCAB_SIZE), k=900)]
    text, calibration = tmp_path / "text", tmp_path / "calibration"
    text.write_text(" ".join(words[:450]))
    calibration.write_text(" ".join(words[450:]))
    asked: list[int] = []

    def claims(checkpoint: Path, quantized: Path | None) -> dict[str, int]:
        assert checkpoint == model
        asked.append(len(dict(dequantized_weights(quantized))) if quantized else 0)
        return {}

    monkeypatch.setattr(quantization_loss, "claims", claims)
    measured = list(losses(model, text, calibration))
    names = [loss.weights for loss in measured]
    assert names[:2] == ["float32", "w8a16, a scale an output"]
    assert names[3:] == [
        "w4a16, groups of 64",
        "w4a16, groups of 64, calibrated",
        "w4a16, groups of 32, calibrated",
    ]
    assert asked == [0, *[14] * len(WAYS)]
    floats, w8a16, fp8, coarse, calibrated, fine = measured
    assert floats.num_bytes > w8a16.num_bytes > fine.num_bytes > calibrated.num_bytes
    assert fp8.num_bytes == pytest.approx(w8a16.num_bytes, rel=0.05)
    assert coarse.num_bytes == pytest.approx(calibrated.num_bytes, rel=0.01)
    assert abs(w8a16.perplexity / floats.perplexity - 1) < abs(coarse.perplexity / floats.perplexity - 1)
    assert len({loss.perplexity for loss in measured}) == len(measured)


def test_the_command_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    measured = [
        Loss("float32", 35.44, 538_000_000, {"pirate": 23, "json": 24, "emoji": 22}),
        Loss("w4a16, groups of 64", 44.36, 170_400_000, {"pirate": 24, "json": 20, "emoji": 9}),
    ]
    monkeypatch.setattr(quantization_loss, "PAGE", page)
    monkeypatch.setattr(quantization_loss, "measured_source", lambda: "By a test.")
    monkeypatch.setattr(quantization_loss, "ensure_default_checkpoint", lambda: tmp_path)
    monkeypatch.setattr(quantization_loss, "losses", lambda *_: iter(measured))
    quantization_loss.main(update_docs=False)
    assert page.read_text() == PAGE.read_text()
    quantization_loss.main(update_docs=True)
    assert [tuple(row.values()) for row in read_cells(page, TABLE)] == [
        ("float32", "35.4", "538 MB", "23", "24", "22"),
        ("w4a16, groups of 64", "44.4", "170 MB", "24", "20", "9"),
    ]
    assert read_table(page, TABLE).endswith("\n\nBy a test.\n")


def test_the_page_has_the_columns_that_the_command_writes() -> None:
    assert loss_table([]).splitlines()[0] == read_table(PAGE, TABLE).splitlines()[0]
