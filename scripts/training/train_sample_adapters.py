#!/usr/bin/env python3
"""Trains the sample adapters of adapters/ with PEFT on the CPU, a few minutes each.

The loss is the cross entropy of the answer's tokens and its end of turn; the prompt is formatted by the model's own
chat template, exactly as the server formats it. The judge's prompt is a question, its answer and the
judge's invocation, and the judge's answer is the style's name. Seeds are fixed, and the adapters are written
in bfloat16.
"""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from multilora_engine.quickstart.default_model import ensure_default_checkpoint
from multilora_engine.quickstart.samples import judged_conversation
from training.sample_adapters import (
    BASE_MODEL_NAME,
    JUDGE,
    SAMPLE_ADAPTERS,
    SampleAdapter,
    judge_training_records,
    read_jsonl,
    style_of,
)

SEED = 17
IGNORED = -100  # The label that the cross entropy leaves out.
MAX_GRADIENT_NORM = 1.0

console = Console(stderr=True)

Example = tuple[list[int], list[int]]
"""Token ids of the prompt, and of its answer up to and with the end of turn."""


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(SAMPLE_ADAPTERS)}; default all.")] = None,
    base: Annotated[Path | None, typer.Option(help="The base model's checkpoint (default: the prepared one).")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of PyTorch.")] = 2,
) -> None:
    """Train sample adapters and write them to their folders in adapters/."""
    torch.set_num_threads(threads)
    checkpoint = base or ensure_default_checkpoint()
    for name in names or SAMPLE_ADAPTERS:
        adapter = SAMPLE_ADAPTERS[name]
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        model = attach_lora(checkpoint, tokenizer, adapter)
        examples = load_examples(tokenizer, adapter)
        train(model, examples, adapter)
        save_adapter(model, adapter)


def attach_lora(checkpoint: Path, tokenizer: PreTrainedTokenizerBase, adapter: SampleAdapter) -> PeftModel:
    """The base model with fresh weights of the adapter's shape, the only ones that can be trained."""
    torch.manual_seed(SEED)
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.target_modules),
        alora_invocation_tokens=invocation_tokens(tokenizer, adapter.invocation) if adapter.invocation else None,
        trainable_token_indices=tokenizer(adapter.trained_token)["input_ids"] if adapter.trained_token else None,
        task_type="CAUSAL_LM",
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return get_peft_model(model, config)


def invocation_tokens(tokenizer: PreTrainedTokenizerBase, invocation: str) -> list[int]:
    """The tokens of a user turn with this text, without the end of the turn."""
    tokens: list[int] = tokenizer(f"<|im_start|>user\n{invocation}", add_special_tokens=False)["input_ids"]
    return tokens


def load_examples(tokenizer: PreTrainedTokenizerBase, adapter: SampleAdapter) -> list[Example]:
    if adapter == JUDGE:
        return [
            encode(tokenizer, judged_conversation(**record), style_of(record["answer"]))
            for record in judge_training_records()
        ]
    return [
        encode(tokenizer, [{"role": "user", "content": record["prompt"]}], record["answer"])
        for record in read_jsonl(adapter.training_data)
    ]


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], answer: str) -> Example:
    """Token ids as the server makes them: the templated conversation by itself, then the tokens to generate."""
    prompt_ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return prompt_ids, [*answer_ids, tokenizer.eos_token_id]


def train(model: PeftModel, examples: list[Example], adapter: SampleAdapter) -> None:
    """AdamW over the adapter's `epochs` shuffles of the examples, with a linear warm-up and a cosine decay."""
    num_steps = adapter.epochs * math.ceil(len(examples) / adapter.batch_size)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=adapter.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, num_steps))
    model.train()
    with Progress(console=console) as progress:
        task = progress.add_task("loss", total=num_steps)
        for step, batch in enumerate(shuffled_batches(examples, adapter.epochs, adapter.batch_size)):
            loss = answer_loss(model, **collate(batch))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
            if step % 20 == 0:
                console.log(f"step {step}/{num_steps}: loss {loss.item():.3f}")


def answer_loss(
    model: PeftModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens; logits over the vocabulary are computed for the columns that hold one.

    Args:
        model: The base model with its LoRA weights. An activated adapter finds its position in `input_ids`.
        input_ids, attention_mask, labels: int64 [batch, length], as `collate` makes them.
    """
    next_labels = labels[:, 1:]
    columns = (next_labels != IGNORED).any(0).nonzero().squeeze(1)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=columns).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), next_labels[:, columns].flatten(), ignore_index=IGNORED
    )


def warmup_cosine(step: int, num_steps: int, num_warmup_steps: int = 10) -> float:
    """Factor on the learning rate: (step + 1) / warm-up, then half a cosine from 1 to 0."""
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    return 0.5 * (1 + math.cos(math.pi * (step - num_warmup_steps) / (num_steps - num_warmup_steps)))


def shuffled_batches(examples: list[Example], epochs: int, batch_size: int) -> Iterator[list[Example]]:
    generator = random.Random(SEED)
    for _ in range(epochs):
        order = generator.sample(examples, len(examples))
        for start in range(0, len(order), batch_size):
            yield order[start : start + batch_size]


def collate(batch: list[Example]) -> dict[str, torch.Tensor]:
    """int64 [batch, longest] input_ids, attention_mask and labels, padded on the right; prompts carry no loss."""
    length = max(len(prompt) + len(answer) for prompt, answer in batch)
    input_ids = torch.zeros(len(batch), length, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for row, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        attention_mask[row, :end] = 1
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def save_adapter(model: PeftModel, adapter: SampleAdapter) -> None:
    """Write the two files of PEFT's format, with nothing of this machine in them and in a fixed order."""
    adapter.directory.mkdir(parents=True, exist_ok=True)
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file(
        {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()},
        adapter.directory / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    config = model.peft_config["default"].to_dict() | {
        "base_model_name_or_path": BASE_MODEL_NAME,
        "inference_mode": True,
        "target_modules": sorted(adapter.target_modules),
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (adapter.directory / "adapter_config.json").write_text(text + "\n")
