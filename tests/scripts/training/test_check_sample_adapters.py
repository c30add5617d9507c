"""How answers on a quantised base model are counted, and which weights they come from."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpoints.tiny_llama import save_tiny_llama
from marked_tables import read_table
from multilora_engine.quantize import OuterOptions, Scheme, dequantized_weights, quantize_checkpoint
from training.check_sample_adapters import PAGE, TABLE, docs_table, load_model, most_lost

PIRATE, PLAIN = "Ahoy, matey, the sky be blue.", "The sky is blue."


def test_lost_answers_are_counted_from_the_float_base() -> None:
    measured = [{"pirate": [PIRATE] * passes + [PLAIN] * (24 - passes)} for passes in (23, 24, 20)]

    assert most_lost("pirate", measured) == 3
    assert most_lost("pirate", measured[:2]) == 0


def test_the_quantised_base_has_the_weights_of_its_codes(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "float", hidden_size=64, intermediate_size=96)
    quantize_checkpoint(
        tmp_path / "float",
        tmp_path / "quantized",
        Scheme("w4a16"),
        calibration=None,
        text=None,
        outer=OuterOptions("none"),
        device=torch.device("cpu"),
        on_progress=lambda *_: None,
    )

    plain = load_model(tmp_path / "float", None, None, "float32")
    quantized = load_model(tmp_path / "float", tmp_path / "quantized", None, "float32")

    weights = dict(dequantized_weights(tmp_path / "quantized"))
    assert len(weights) == 14
    for name, parameter in quantized.named_parameters():
        expected = weights.get(name.removesuffix(".weight"), plain.get_parameter(name))
        assert torch.equal(parameter, expected)


def test_the_page_has_a_row_an_adapter_with_its_rate_and_the_bases() -> None:
    answers = {"base": [PLAIN] * 3 + [PIRATE], "pirate": [PIRATE] * 4, "json": [PLAIN] * 4, "emoji": ["🐝🌻"] * 2}
    lines = docs_table(answers).splitlines()
    assert lines[2:] == [
        "| `pirate` | 4 | q k v o gate up down | talks like a pirate | 1/4, 25% | 4/4, 100% |",
        "| `json` | 8 | q k v o | answers with a JSON object | 0/4, 0% | 0/4, 0% |",
        "| `emoji` | 16 | q v | cheers, with emoji | 0/4, 0% | 2/2, 100% |",
    ]
    shown = read_table(PAGE, TABLE).splitlines()
    assert shown[:2] == lines[:2]
    assert [row.rpartition(" | ")[0].rpartition(" | ")[0] for row in shown[2:5]] == [
        row.rpartition(" | ")[0].rpartition(" | ")[0] for row in lines[2:]
    ]
