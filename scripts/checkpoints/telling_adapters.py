"""A model and adapters that tell who they are: adapter `number` in `version` answers any prompt with six tokens, one
for each hexadecimal digit of the two, and the base model with a seventh that no adapter ever gives.

Every digit comes from another (module, layer) row of the adapter, number and version taking turns, so a row or a page
that belongs to another adapter changes the answer as surely as a wrong adapter. Half the digits go through the
adapter's values at the tokens of the prompt: they are read back from the KV cache, so a block of another adapter, or
of another version, gives a wrong digit too.

How it works. The residual stream has a constant, one-hot *states*, and one dimension for each (place, digit).
A token of the prompt is in state 0, the token of place p in state p + 1: what the answer needs next. Queries are zero,
so attention is the mean over the context. The gate opens the dimensions of the current state's place and shuts all
others, so digits that lie ready for later places count only when it is their turn. The largest dimension wins.

The MLP may be wider than the residual stream, for adapters that fill many pages. Its meaningful dimensions then
lie scattered over the matrices, and the adapters have noise between them, where the gate of the base model is zero.

There may be experts in place of the MLP, all as the MLP would be. The router sends each state to two of them, and an
adapter speaks through one of the two: the other experts are silent, or absent. An adapter on the wrong expert, or the
entries of an adapter that was there before, change the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_wire.layout import AdapterLayout

NUM_PLACES = 6
NUM_DIGITS = 16
MAX_NUMBER = NUM_DIGITS ** (NUM_PLACES // 2)
"""The number of adapters, and of versions: 0 .. MAX_NUMBER - 1."""

MAX_RANK = 8
HIDDEN_SIZE = 128
NUM_LAYERS = 2
SPANNING_INTERMEDIATE_SIZE = 16384
"""The width of an MLP whose adapters have pieces that span pages: 512 KiB at `MAX_RANK`, in pages of 256 KiB."""

EXPERT_INTERMEDIATE_SIZE = 256
"""The width of an expert. A half of it is noise."""

_NUM_CHOSEN = 2
"""Experts that a token's state is sent to."""

BASE_TOKEN = NUM_PLACES * NUM_DIGITS
PROMPT_TOKENS = range(BASE_TOKEN + 1, HIDDEN_SIZE)
BASE_ANSWER = [BASE_TOKEN] * NUM_PLACES

_DOWN = 0.4
"""Weight of the base model's down projections: with more, their addition to the residual stream drowns the states."""

_SCATTER = 4421
"""An odd factor, so that modulo a power of two no two dimensions fall on one."""

_CONSTANT = 0
_FIRST_STATE = 1
_FIRST_DIGIT = 8
_DIGITS = slice(_FIRST_DIGIT, _FIRST_DIGIT + NUM_PLACES * NUM_DIGITS)


@dataclass(frozen=True)
class _Source:
    """The row of an adapter that a place's digit comes from, the input it looks for, and how loudly it speaks."""

    module: str
    layer: int
    state: int
    strength: float


# v and o see the prompt (state 0) and prepare a digit for later; up and down speak when it is their turn.
_SOURCES = (
    _Source("attn_v", 0, 0, 0.25),
    _Source("mlp_gate", 0, 1, 1.0),
    _Source("attn_dense", 1, 0, 1.5),
    _Source("mlp_4h_to_h", 1, 3, 1.0),
    _Source("mlp_4h_to_h", 0, 4, 1.0),
    _Source("attn_v", 1, 0, 1.5),
)
_SILENT = (("attn_dense", 0), ("mlp_gate", 1))
_UP_MODULE, _DOWN_MODULE = "mlp_gate", "mlp_4h_to_h"
_EXPERT_MODULES = {_UP_MODULE: "moe_gate", _DOWN_MODULE: "moe_4h_to_h"}
"""The wire's names of the linears into and out of the MLP that an adapter changes."""


@dataclass(frozen=True)
class Matrices:
    """A [rank, in] and B [out, rank] of one row; the scale is in B.

    state: in which the row speaks, with one value of B, the strength; -1 for a silent row.
    """

    module: str
    layer: int
    a: torch.Tensor
    b: torch.Tensor
    state: int = -1
    strength: float = 0.0


def answer(number: int, version: int) -> list[int]:
    """The answer that adapter `number` must give in this version."""
    return [place * NUM_DIGITS + digit for place, digit in enumerate(_digits(number, version))]


def save_checkpoint(path: Path, intermediate_size: int = HIDDEN_SIZE, num_experts: int = 0) -> Path:
    """Write the base model with a tokenizer into `path`, as transformers would. Context 512, no end token.

    intermediate_size: width of the MLP, a power of two, at least `HIDDEN_SIZE`. num_experts: 0 for an MLP.
    """
    sizes: dict[str, Any] = {
        "vocab_size": HIDDEN_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    experts: dict[str, Any] = {"num_local_experts": num_experts, "num_experts_per_tok": _NUM_CHOSEN}
    model: PreTrainedModel = (
        MixtralForCausalLM(MixtralConfig(**sizes, **experts)) if num_experts else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    gate = _scattered(_gate(), intermediate_size)
    up = _scattered(_diagonal(slice(_FIRST_STATE, _DIGITS.stop)), intermediate_size)
    down = _scattered(_diagonal(_DIGITS) * _DOWN, intermediate_size).T
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(_embeddings())
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            attention.q_proj.weight.zero_()
            attention.k_proj.weight.zero_()
            attention.v_proj.weight.copy_(_diagonal(slice(_FIRST_STATE, _FIRST_DIGIT)))
            attention.o_proj.weight.copy_(_diagonal(_DIGITS))
            if num_experts:
                mlp.gate.weight.copy_(_router(num_experts))
                mlp.experts.gate_up_proj.copy_(torch.cat([gate, up]).expand(num_experts, -1, -1))
                mlp.experts.down_proj.copy_(down.expand(num_experts, -1, -1))
                continue
            mlp.gate_proj.weight.copy_(gate)
            mlp.up_proj.weight.copy_(up)
            mlp.down_proj.weight.copy_(down)
        model.lm_head.weight.copy_(_head())
    model.save_pretrained(path)
    save_plain_tokenizer(path, HIDDEN_SIZE)
    return path


def save_plain_tokenizer(path: Path, vocab_size: int) -> None:
    """Token t is the text `<t>`; for prompts that are sent as ids. In a text, every character is the last token."""
    vocab = {f"<{token}>": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=f"<{vocab_size - 1}>"))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)


def adapter_matrices(number: int, version: int, intermediate_size: int = HIDDEN_SIZE) -> list[Matrices]:
    """The rows of an adapter. Its rank, and which of a row's rank columns speaks, differ from version to version."""
    inner = _inner_dimensions(intermediate_size)
    random = Random(number * MAX_NUMBER + version)
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    rank = random.randint(1, MAX_RANK)
    rows = []
    for place, (source, digit) in enumerate(zip(_SOURCES, _digits(number, version), strict=True)):
        row = _silent_row(source.module, source.layer, rank, generator, intermediate_size)
        column = random.randrange(rank)
        a = torch.zeros(HIDDEN_SIZE)
        a[_FIRST_STATE + source.state] = 1
        b = torch.zeros(HIDDEN_SIZE)
        b[_FIRST_DIGIT + place * NUM_DIGITS + digit] = source.strength
        row.a[column, inner if source.module == _DOWN_MODULE else slice(None)] = a
        row.b[inner if source.module == _UP_MODULE else slice(None), column] = b
        rows.append(replace(row, state=source.state, strength=source.strength))
    return rows + [_silent_row(module, layer, rank, generator, intermediate_size) for module, layer in _SILENT]


def packed_adapter(number: int, version: int, layout: AdapterLayout) -> PackedAdapter:
    """An adapter as a front sends it to the engine, by way of the wire format."""
    up_names = (_UP_MODULE, _EXPERT_MODULES[_UP_MODULE])
    ((intermediate_size, num_experts),) = {(m.out_size, m.experts) for m in layout.sites.modules if m.name in up_names}
    rows = adapter_matrices(number, version, intermediate_size)
    ids, names = layout.sites.module_ids, _EXPERT_MODULES if num_experts > 1 else {}
    random = Random(f"experts {number} {version}")
    wire = []
    for row in rows:
        of_experts = row.module in names
        a, b = _on_experts(row, num_experts, random) if of_experts else (row.a, row.b)
        wire.append(torch.cat([a.flatten(), b.flatten()]))
    config = [[ids[names.get(row.module, row.module)], row.layer, len(row.a), 0] for row in rows]
    return pack_adapter(pad_sequence(wire, batch_first=True), torch.tensor(config, dtype=torch.int32), layout)


def _on_experts(row: Matrices, num_experts: int, random: Random) -> tuple[torch.Tensor, torch.Tensor]:
    """A [experts, rank, in] and B [experts, out, rank]: a row's matrices on one of the experts that its state chooses.

    The others are silent: with the row's noise, or with none, and with its A or with A of their own.
    """
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    a = row.a.expand(num_experts, -1, -1)
    if random.random() < 0.5:
        a = torch.randn(a.shape, generator=generator)
    silent = row.b * (row.b != row.b.new_tensor(row.strength)) if row.state >= 0 else row.b
    has_noise = torch.tensor([random.random() < 0.5 for _ in range(num_experts)])
    b = silent * has_noise[:, None, None]
    if row.state >= 0:
        speaker = random.choice(_chosen(row.state, num_experts))
        a = a.clone()
        a[speaker], b[speaker] = row.a, torch.where(row.b == row.strength, _NUM_CHOSEN * row.b, row.b)
    return a, b


def _chosen(state: int, num_experts: int) -> list[int]:
    """The experts that a state is sent to."""
    return [(state + n) % num_experts for n in range(_NUM_CHOSEN)]


def _router(num_experts: int) -> torch.Tensor:
    """[experts, hidden]"""
    router = torch.zeros(num_experts, HIDDEN_SIZE)
    for state in range(_FIRST_DIGIT - _FIRST_STATE):
        router[_chosen(state, num_experts), _FIRST_STATE + state] = 8
    return router


def _digits(number: int, version: int) -> list[int]:
    """The digits of number and version in turns, the least significant first."""
    assert 0 <= number < MAX_NUMBER
    assert 0 <= version < MAX_NUMBER
    return [value // NUM_DIGITS**i % NUM_DIGITS for i in range(NUM_PLACES // 2) for value in (number, version)]


def _silent_row(module: str, layer: int, rank: int, generator: torch.Generator, intermediate_size: int) -> Matrices:
    """A row that changes no answer: its B is zero, but for rows of `up` that the base model's gate shuts."""
    a = torch.randn(rank, intermediate_size if module == _DOWN_MODULE else HIDDEN_SIZE, generator=generator)
    b = torch.zeros(HIDDEN_SIZE, rank)
    if module == _UP_MODULE:
        b = torch.randn(intermediate_size, rank, generator=generator)
        b[_inner_dimensions(intermediate_size)] = 0
    return Matrices(module, layer, a, b)


def _inner_dimensions(intermediate_size: int) -> torch.Tensor:
    """[hidden]: the dimension inside the MLP for each dimension of the residual stream."""
    assert intermediate_size >= HIDDEN_SIZE
    assert intermediate_size.bit_count() == 1
    return torch.arange(HIDDEN_SIZE) * _SCATTER % intermediate_size


def _scattered(rows: torch.Tensor, intermediate_size: int) -> torch.Tensor:
    """[intermediate, hidden]: `rows` [hidden, hidden] at their dimensions inside the MLP, zeros elsewhere."""
    scattered = torch.zeros(intermediate_size, HIDDEN_SIZE)
    scattered[_inner_dimensions(intermediate_size)] = rows
    return scattered


def _embeddings() -> torch.Tensor:
    """[vocabulary, hidden]: the constant and the state of every token."""
    table = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
    table[:, _CONSTANT] = 1
    for token in range(HIDDEN_SIZE):
        place = token // NUM_DIGITS
        state = place + 1 if place + 1 < NUM_PLACES else 0
        table[token, _FIRST_STATE + state] = 1
    return table


def _diagonal(dimensions: slice) -> torch.Tensor:
    """[hidden, hidden]: passes these dimensions on, and nothing else."""
    ones = torch.zeros(HIDDEN_SIZE)
    ones[dimensions] = 1
    return ones.diag()


def _gate() -> torch.Tensor:
    """[intermediate, hidden]: a state opens the digits of its place, and its own dimension, for `down` to see."""
    gate = _diagonal(slice(_FIRST_STATE, _FIRST_DIGIT))
    for place in range(NUM_PLACES):
        start = _FIRST_DIGIT + place * NUM_DIGITS
        gate[start : start + NUM_DIGITS, _FIRST_STATE + place] = 1
    return gate


def _head() -> torch.Tensor:
    """[vocabulary, hidden]: each digit's token reads its dimension, the base model's the constant."""
    head = torch.zeros(HIDDEN_SIZE, HIDDEN_SIZE)
    head[:BASE_TOKEN, _DIGITS] = torch.eye(BASE_TOKEN)
    head[BASE_TOKEN, _CONSTANT] = 1
    return head
