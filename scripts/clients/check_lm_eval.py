"""Compares the log-likelihoods that lm-eval got from a server with those of transformers, adapter included.

lm-eval writes them with `--output_path DIR --log_samples`; the exit status is 1 if one differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 1e-3
"""The largest difference of two log-likelihoods in float32: sums over some dozen tokens."""


@dataclass(frozen=True)
class Likelihood:
    """One question of lm-eval. context: empty when the whole text was asked for, after the model's first token.

    is_greedy: whether each token of the continuation is the likeliest, None when that was not asked.
    """

    context: str
    continuation: str
    value: float
    is_greedy: bool | None


def read_likelihoods(directory: Path) -> list[Likelihood]:
    """The questions of all samples below `directory`."""
    lines = (line for path in sorted(directory.rglob("samples_*.jsonl")) for line in path.read_text().splitlines())
    return [likelihood for line in lines for likelihood in _likelihoods_of(json.loads(line))]


def _likelihoods_of(sample: dict[str, Any]) -> Iterator[Likelihood]:
    for arguments, (response, *_) in zip(sample["arguments"].values(), sample["resps"], strict=True):
        if isinstance(response, list):
            value, is_greedy = response
            yield Likelihood(arguments["arg_0"], arguments["arg_1"], float(value), is_greedy in (True, "True"))
        else:
            yield Likelihood("", arguments["arg_0"], float(response), None)


class Reference:
    """transformers in float32, with PEFT's adapter when there is one."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
        base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = base.eval() if adapter is None else PeftModel.from_pretrained(base, adapter).float().eval()

    def tokens(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Context and continuation in tokens, as lm-eval cuts them: where the tokens of the context alone end."""
        whole = self._encode(context + continuation)
        if not context:
            return [self._tokenizer.bos_token_id], whole
        num_context = len(self._encode(context))
        return whole[:num_context], whole[num_context:]

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return token_ids

    @torch.no_grad()
    def log_probs(self, context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
        """The log-probability of each token of the continuation, and whether each is the likeliest."""
        logits = self._model(input_ids=torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        told = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        return told.tolist(), logits.argmax(dim=-1).tolist() == continuation


def main(
    directory: Annotated[Path, typer.Argument(help="The directory that lm-eval wrote.", exists=True)],
    model: Annotated[Path, typer.Option(help="The served checkpoint.", exists=True)],
    adapter: Annotated[Path | None, typer.Option(help="The adapter that was asked, as PEFT saves it.")] = None,
) -> None:
    """Compare lm-eval's log-likelihoods with those of transformers."""
    reference, likelihoods = Reference(model, adapter), read_likelihoods(directory)
    differences = [_difference(reference, likelihood) for likelihood in likelihoods]
    if not differences or max(differences) > TOLERANCE:
        typer.echo(f"{len(differences)} log-likelihoods, largest difference {max(differences, default=0):.2e}")
        raise typer.Exit(1)
    typer.echo(f"{len(differences)} log-likelihoods are those of transformers within {max(differences):.1e}")


def _difference(reference: Reference, told: Likelihood) -> float:
    """The distance of lm-eval's log-likelihood from the reference's; infinite if they disagree on `is_greedy`."""
    log_probs, is_greedy = reference.log_probs(*reference.tokens(told.context, told.continuation))
    return abs(sum(log_probs) - told.value) if told.is_greedy in (None, is_greedy) else float("inf")


if __name__ == "__main__":
    typer.run(main)
