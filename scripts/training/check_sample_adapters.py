#!/usr/bin/env python3
"""Measures the sample adapters' claims with transformers and PEFT, independently of the server.

Greedy answers to prompts that no adapter saw in training are judged by a program, for the base model and for each
adapter of a style. The judge names the styles of all these answers, and so does the base model. Exits with status 1
when an adapter's effect is too rare, or when the base model shows it by itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from peft import PeftModel
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from marked_tables import console_table, markdown_table, write_table
from multilora_engine.lora.format import ARENA_DTYPES
from multilora_engine.quickstart.default_model import ensure_default_checkpoint
from multilora_engine.quickstart.samples import judged_conversation
from multilora_kernels.adapter_codes import dequantize_a, dequantize_b
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_wire.pieces import CODE_BITS, StoredDtype
from sources import measured_source
from training.sample_adapters import (
    ADAPTERS_DIRECTORY,
    JUDGE,
    SAMPLE_ADAPTERS,
    STYLE_ADAPTERS,
    SampleAdapter,
    held_out_prompts,
    style_of,
)

PAGE = ADAPTERS_DIRECTORY / "README.md"
TABLE = "claims"
MINIMUM_ADAPTER_RATE = 0.8
MAXIMUM_BASE_RATE = 0.2

console = Console(stderr=True)

MAXIMUM_VERDICT_TOKENS = 8


@dataclass(frozen=True)
class Trial:
    """The answers of the base model and of an adapter in one conversation, and whether each shows the effect."""

    messages: list[dict[str, str]]
    base_answer: str
    answer: str
    base_shows: bool
    shows: bool


Trials = dict[str, list[Trial]]
"""The trials of each adapter by its name."""


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
    checkpoint = base or ensure_default_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    trials = {}
    with console.status("The base model answers"):
        base_model = load_model(checkpoint, None, lora_dtype)
        questions = [[{"role": "user", "content": prompt}] for prompt in held_out_prompts()]
        base_answers = generate_answers(base_model, tokenizer, questions, max_new_tokens)
    for name, style in track(STYLE_ADAPTERS.items(), description="Answering", console=console):
        answers = generate_answers(load_model(checkpoint, style, lora_dtype), tokenizer, questions, max_new_tokens)
        trials[name] = [
            Trial(messages, base_answer, answer, style.judge(base_answer), style.judge(answer))
            for messages, base_answer, answer in zip(questions, base_answers, answers, strict=True)
        ]
    with console.status("The judge names the styles"):
        answered = list(zip(held_out_prompts(), base_answers, strict=True))
        answered += [(trial.messages[0]["content"], trial.answer) for style in trials.values() for trial in style]
        conversations = [judged_conversation(*pair) for pair in answered]
        base_verdicts = generate_answers(base_model, tokenizer, conversations, MAXIMUM_VERDICT_TOKENS)
        judge = load_model(checkpoint, JUDGE, lora_dtype)
        verdicts = generate_answers(judge, tokenizer, conversations, MAXIMUM_VERDICT_TOKENS)
        styles = [style_of(answer) for _, answer in answered]
        trials[JUDGE.name] = [
            Trial(messages, base_verdict, verdict, base_verdict == style, verdict == style)
            for messages, base_verdict, verdict, style in zip(
                conversations, base_verdicts, verdicts, styles, strict=True
            )
        ]
    if show_answers:
        print_answers(trials)
    title = f"Held-out conversations showing the effect, adapters in {lora_dtype}"
    Console().print(console_table(COLUMNS, table_rows(trials), title))
    if update_docs:
        write_table(PAGE, TABLE, docs_table(trials), source)
    if failures := [name for name in SAMPLE_ADAPTERS if not has_effect(trials[name])]:
        console.print(f"[red]Below the thresholds:[/red] {', '.join(failures)}")
        raise typer.Exit(code=1)


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
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, str]]],
    max_new_tokens: int,
) -> list[str]:
    """Greedy answers in the chat template, without special tokens, of one batch that is padded on the left."""
    batch = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    assert isinstance(batch, BatchEncoding)
    output = model.eval().generate(**batch, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def has_effect(trials: list[Trial]) -> bool:
    return sum(trial.shows for trial in trials) >= MINIMUM_ADAPTER_RATE * len(trials) and sum(
        trial.base_shows for trial in trials
    ) <= MAXIMUM_BASE_RATE * len(trials)


def print_answers(trials: Trials) -> None:
    for name, of_adapter in trials.items():
        for trial in of_adapter:
            texts = [message["content"] for message in trial.messages]
            print(f"{'pass' if trial.shows else 'FAIL'} {name}: {texts!r}")
            print(f"  base: {trial.base_answer!r}\n  adapter: {trial.answer!r}")


COLUMNS = ("adapter", "rank", "modules", "claim", "base", "adapter's")


def table_rows(trials: Trials) -> Iterator[tuple[str, ...]]:
    """A row an adapter, with the share of answers that show its effect, of the base model's and of its own."""
    for name, of_adapter in trials.items():
        adapter = SAMPLE_ADAPTERS[name]
        modules = " ".join(module.removesuffix("_proj") for module in adapter.target_modules)
        rates = (
            f"{shown}/{len(of_adapter)}, {shown / len(of_adapter):.0%}"
            for shown in (sum(trial.base_shows for trial in of_adapter), sum(trial.shows for trial in of_adapter))
        )
        row = f", row of `{adapter.trained_token}`" if adapter.trained_token else ""
        yield name, str(adapter.rank), modules + row, adapter.claim, *rates


def docs_table(trials: Trials) -> str:
    """The rows as a document has them."""
    return markdown_table(COLUMNS, ((f"`{name}`", *cells) for name, *cells in table_rows(trials)), numbers=())
