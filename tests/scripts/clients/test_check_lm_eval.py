from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from clients.check_lm_eval import TOLERANCE, main
from servers.tiny_server import save_tiny_model

CONTEXT, CONTINUATION, LINE = "Bees make", " honey and wax", "The sea\n\nis wide. ¿Café?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that changes every answer."""
    path = tmp_path_factory.mktemp("adapter")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(path)
    return path


@torch.no_grad()
def likelihood(model: Path, context: list[int], continuation: list[int]) -> float:
    """Token by token, each predicted by the model alone with those before it."""
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, token_ids = 0.0, list(context)
    for token_id in continuation:
        total += float(causal(input_ids=torch.tensor([token_ids])).logits[0, -1].log_softmax(dim=-1)[token_id])
        token_ids.append(token_id)
    return total


@pytest.fixture(scope="module")
def told(model: Path) -> tuple[float, float]:
    """The log-likelihoods of `CONTINUATION` after `CONTEXT`, and of `LINE` after the first token."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    context, continuation, line = (tokenizer(text).input_ids for text in (CONTEXT, CONTINUATION, LINE))
    return likelihood(model, context, continuation), likelihood(model, [tokenizer.bos_token_id], line)


def write_samples(directory: Path, choice: float, line: float, is_greedy: bool = False) -> None:
    """As lm-eval writes them: a file a task, below a directory of the model's name."""
    samples: dict[str, dict[str, Any]] = {
        "choices": {
            "arguments": {"gen_args_0": {"arg_0": CONTEXT, "arg_1": CONTINUATION}},
            "resps": [[[str(choice), str(is_greedy)]]],
        },
        "lines": {"arguments": {"gen_args_0": {"arg_0": LINE}}, "resps": [[str(line)]]},
    }
    for task, sample in samples.items():
        (directory / f"samples_{task}_now.jsonl").write_text(json.dumps(sample) + "\n")


def test_the_log_likelihoods_of_transformers_pass(
    model: Path, told: tuple[float, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(tmp_path, *told)
    main(tmp_path, model)
    assert capsys.readouterr().out.startswith("2 log-likelihoods are those of transformers")


@pytest.mark.parametrize("wrong", ["choice", "line", "is_greedy"])
def test_one_that_is_another_fails(model: Path, told: tuple[float, float], tmp_path: Path, wrong: str) -> None:
    choice, line = told
    write_samples(
        tmp_path,
        choice + 2 * TOLERANCE * (wrong == "choice"),
        line - 2 * TOLERANCE * (wrong == "line"),
        is_greedy=wrong == "is_greedy",
    )
    with pytest.raises(typer.Exit):
        main(tmp_path, model)


def test_the_base_models_are_not_those_of_an_adapter(
    model: Path, adapter: Path, told: tuple[float, float], tmp_path: Path
) -> None:
    write_samples(tmp_path, *told)
    with pytest.raises(typer.Exit):
        main(tmp_path, model, adapter)


def test_no_log_likelihood_at_all_fails(model: Path, tmp_path: Path) -> None:
    with pytest.raises(typer.Exit):
        main(tmp_path, model)
