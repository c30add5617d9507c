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
from training.quantization_loss import PAGE, TABLE, Loss, loss_table, losses


def split_words(tokenizer: Path) -> None:
    """Have a tokenizer of words find them between spaces."""
    backend = Tokenizer.from_file(str(tokenizer))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tokenizer))


@pytest.mark.long(reason="quantises a tiny model six times, and takes its perplexity eight times")
def test_each_way_is_measured_on_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_tokenizer(save_tiny_llama(tmp_path / "model", hidden_size=128, intermediate_size=192))
    split_words(model / "tokenizer.json")
    words = [f"w{number}" for number in Random(3).choices(range(VOCAB_SIZE), k=900)]
    text, calibration = tmp_path / "text", tmp_path / "calibration"
    text.write_text(" ".join(words[:450]))
    calibration.write_text(" ".join(words[450:]))
    asked: list[tuple[int, str, str]] = []

    def claims(checkpoint: Path, dtype: str, lora_dtype: str, max_tokens: int) -> dict[str, int]:
        is_quantized = checkpoint != model
        asked.append((len(dict(dequantized_weights(checkpoint))) if is_quantized else 0, dtype, lora_dtype))
        return {}

    monkeypatch.setattr(quantization_loss, "engine_claims", claims)
    measured = {loss.weights: loss for loss in losses(model, text, calibration)}
    assert list(measured) == [
        "float32",
        "bfloat16, arithmetic too",
        "w8a16, a scale an output",
        "fp8, a scale an output",
        "w4a16, groups of 64",
        "w4a16, groups of 64, calibrated",
        "w4a16, groups of 32",
        "w4a16, groups of 32, calibrated",
        "float32, adapters in int8",
        "float32, adapters in fp8",
        "float32, adapters in int4",
    ]
    floats, half, *quantized = [(0, "float32", "auto"), (0, "bfloat16", "auto"), *[(14, "float32", "auto")] * 6]
    assert asked == [floats, half, *quantized, *((0, "float32", codes) for codes in ("int8", "fp8", "int4"))]
    found = [loss.perplexity for loss in measured.values()]
    assert found[-3:] == [None, None, None]
    assert len({*found[:-3]}) == 8
    first = measured["float32"]
    assert first.perplexity is not None
    distances = {name: abs((loss.perplexity or 0) / first.perplexity - 1) for name, loss in measured.items()}
    assert distances["w8a16, a scale an output"] < distances["w4a16, groups of 64"]
    sizes = {name: loss.num_bytes for name, loss in measured.items()}
    assert sizes["float32"] == sizes["bfloat16, arithmetic too"] == sizes["float32, adapters in int4"]
    assert sizes["float32"] > sizes["w8a16, a scale an output"] > sizes["w4a16, groups of 32"]
    assert sizes["w4a16, groups of 32"] > sizes["w4a16, groups of 64"]
    assert sizes["w4a16, groups of 64"] == pytest.approx(sizes["w4a16, groups of 64, calibrated"], rel=0.01)


def test_the_command_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    measured = [
        Loss("float32", 35.44, 538_000_000, {"pirate": 23, "json": 24, "emoji": 22}),
        Loss("w4a16, groups of 64", 44.36, 170_400_000, {"pirate": 24, "json": 22, "emoji": 19}, 2),
        Loss("float32, adapters in int4", None, 538_000_000, {"pirate": 23, "json": 22, "emoji": 20}, 2),
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
        ("w4a16, groups of 64", "44.4", "170 MB", "24", "22", "19, missed"),
        ("float32, adapters in int4", "", "538 MB", "23", "22", "20"),
    ]
    assert read_table(page, TABLE).endswith("\n\nBy a test.\n")


def test_the_page_has_the_columns_that_the_command_writes() -> None:
    assert loss_table([]).splitlines()[0] == read_table(PAGE, TABLE).splitlines()[0]
