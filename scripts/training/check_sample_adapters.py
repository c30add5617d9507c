#!/usr/bin/env python3
"""Measures the sample adapters' claims with transformers and PEFT, independently of the server.

Greedy answers to prompts that no adapter saw in training are judged by a program, for the base model and for each
adapter. Exits with status 1 when an adapter's effect is too rare, or when the base model shows it by itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from peft import PeftModel
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from checkpoints.prepare_default_model import default_checkpoint
from marked_tables import console_table, markdown_table, write_table
from multilora_engine.lora.format import ARENA_DTYPES
from multilora_kernels.adapter_codes import dequantize_a, dequantize_b
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_wire.pieces import CODE_BITS, StoredDtype
from sources import measured_source
from training.sample_adapters import ADAPTERS_DIRECTORY, SAMPLE_ADAPTERS, SampleAdapter, held_out_prompts

PAGE = ADAPTERS_DIRECTORY / "README.md"
TABLE = "claims"
MINIMUM_ADAPTER_RATE = 0.8
MAXIMUM_BASE_RATE = 0.2

console = Console(stderr=True)

Answers = dict[str, list[str]]
"""The answers of the base model, as `base`, and of each adapter by its name."""


def main(
    base: Annotated[Path | None, typer.Option(help="The base model's checkpoint (default: the prepared one).")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 40,
    threads: Annotated[int, typer.Option(help="CPU threads of PyTorch.")] = 2,
    lora_dtype: Annotated[
        StoredDtype, typer.Option(help="Give the adapters the values that a server of this `lora_dtype` has of them.")
    ] = "float32",
    show_answers: Annotated[bool, typer.Option("--show-answers", help="Print each answer with its verdict.")] = False,
    update_docs: Annotated[bool, typer.Option("--docs", help="Write the table of adapters/README.md.")] = False,
) -> None:
    """Print the measured table, and fail below the thresholds."""
    if update_docs and lora_dtype != "float32":
        raise typer.BadParameter("--docs writes the rates of adapters as they were trained; leave out --lora-dtype")
    source = measured_source() if update_docs else ""
    torch.set_num_threads(threads)
    checkpoint = base or default_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    prompts = encode_prompts(tokenizer, held_out_prompts())
    answers = {
        name: generate_answers(
            load_model(checkpoint, SAMPLE_ADAPTERS.get(name), lora_dtype), tokenizer, prompts, max_new_tokens
        )
        for name in track(["base", *SAMPLE_ADAPTERS], description="Answering", console=console)
    }
    if show_answers:
        print_answers(answers)
    title = f"Held-out prompts showing the effect, adapters in {lora_dtype}"
    Console().print(console_table(COLUMNS, table_rows(answers), title))
    if update_docs:
        write_table(PAGE, TABLE, docs_table(answers), source)
    if failures := [name for name in SAMPLE_ADAPTERS if not has_effect(name, answers)]:
        console.print(f"[red]Below the thresholds:[/red] {', '.join(failures)}")
        raise typer.Exit(code=1)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> BatchEncoding:
    """All prompts in the chat template, as one batch padded on the left."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    batch = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    assert isinstance(batch, BatchEncoding)
    return batch


def load_model(checkpoint: Path, adapter: SampleAdapter | None, lora_dtype: StoredDtype) -> PreTrainedModel | PeftModel:
    """The base model in float32, with the adapter as it is stored."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if adapter is None:
        return model
    adapted = PeftModel.from_pretrained(model, adapter.directory)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data = as_stored(parameter.data, ".lora_A." in name, lora_dtype)
    return adapted


def as_stored(matrix: torch.Tensor, is_a: bool, lora_dtype: StoredDtype) -> torch.Tensor:
    """The values of A or B that the stored type keeps, in float32."""
    stored = ARENA_DTYPES[lora_dtype]
    if lora_dtype not in CODE_BITS:
        return matrix.to(stored).float()
    rows, columns = matrix.shape
    if is_a:
        return dequantize_a(quantize_a(matrix, stored), rows, columns, stored)
    return dequantize_b(quantize_b(matrix, stored), rows, columns, stored)


def generate_answers(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, prompts: BatchEncoding, max_new_tokens: int
) -> list[str]:
    """Greedy answers, without special tokens."""
    output = model.eval().generate(**prompts, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)


def num_passes(adapter: SampleAdapter, answers: list[str]) -> int:
    """The answers that show the adapter's effect."""
    return sum(map(adapter.judge, answers))


def pass_rate(adapter: SampleAdapter, answers: list[str]) -> float:
    return num_passes(adapter, answers) / len(answers)


def has_effect(name: str, answers: Answers) -> bool:
    adapter = SAMPLE_ADAPTERS[name]
    return (
        pass_rate(adapter, answers[name]) >= MINIMUM_ADAPTER_RATE
        and pass_rate(adapter, answers["base"]) <= MAXIMUM_BASE_RATE
    )


def print_answers(answers: Answers) -> None:
    for name, adapter in SAMPLE_ADAPTERS.items():
        for prompt, base_answer, answer in zip(held_out_prompts(), answers["base"], answers[name], strict=True):
            verdict = "pass" if adapter.judge(answer) else "FAIL"
            print(f"{verdict} {name}: {prompt!r}\n  base: {base_answer!r}\n  adapter: {answer!r}")


COLUMNS = ("adapter", "rank", "modules", "claim", "base", "adapter's")


def table_rows(answers: Answers) -> Iterator[tuple[str, ...]]:
    """A row an adapter, with the share of answers that show its effect, of the base model's and of its own."""
    for name, adapter in SAMPLE_ADAPTERS.items():
        rates = (
            f"{num_passes(adapter, answers[source])}/{len(answers[source])}, {pass_rate(adapter, answers[source]):.0%}"
            for source in ("base", name)
        )
        modules = " ".join(module.removesuffix("_proj") for module in adapter.target_modules)
        yield name, str(adapter.rank), modules, adapter.claim, *rates


def docs_table(answers: Answers) -> str:
    """The rows as a document has them."""
    return markdown_table(COLUMNS, ((f"`{name}`", *cells) for name, *cells in table_rows(answers)), numbers=())
