"""Tiny encoder-decoder models of transformers, and a cache for them that is driven by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

from multilora_engine.batch.forward_batch import CrossAttention, ForwardBatch, KVCache, SourceBatch, TokenLoRAs
from multilora_engine.models.loader import load_model
from multilora_engine.models.model import Model, only_group
from multilora_engine.models.weights import Placement
from multilora_kernels import LoRATables
from multilora_wire.sites import ModelSites

VOCAB_SIZE = 103
T5_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 40,
    "d_kv": 12,
    "d_ff": 52,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 5,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 18,
    "decoder_start_token_id": 0,
}
"""Heads that together have another size than the model, and distances beyond the last bucket's edge."""
BART_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 44,
    "max_position_embeddings": 64,
    "init_std": 0.3,
}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5_SHAPE)),
    "t5 v1.1": lambda: T5ForConditionalGeneration(
        T5Config(**T5_SHAPE, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "mt5": lambda: MT5ForConditionalGeneration(MT5Config(**T5_SHAPE | {"d_kv": 6})),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART_SHAPE)),
    "bart relu": lambda: BartForConditionalGeneration(
        BartConfig(**BART_SHAPE | {"encoder_attention_heads": 4}, scale_embedding=True, activation_function="relu")
    ),
    "mbart": lambda: MBartForConditionalGeneration(
        MBartConfig(**BART_SHAPE, scale_embedding=True, decoder_start_token_id=2)
    ),
}
"""Of encoders and decoders with other numbers of layers, and of other sizes."""
OWN_HEADS = ("t5 v1.1", "mt5")


def make_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Random weights, norms, biases and positions included, large enough that everything counts."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for of, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.0 if of.endswith("bias") else 1.0, 0.3)
            elif "relative_attention_bias" in of:
                parameter.normal_(0.0, 1.5)
            elif ".q." in of or ".k." in of:
                parameter.normal_(0.0, 0.12)
        if name in OWN_HEADS:
            model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape))
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    return model


@dataclass
class Adapters:
    """Random adapters of PEFT on a model, and their tables.

    model: with each adapter under its name. tables: row i is of the i-th adapter.
    """

    model: PeftModel
    names: list[str] = field(default_factory=list)

    @classmethod
    def random(cls, model: PreTrainedModel, configs: Mapping[str, LoraConfig]) -> Adapters:
        names = list(configs)
        peft = get_peft_model(model, configs[names[0]], adapter_name=names[0])
        for name in names[1:]:
            peft.add_adapter(name, configs[name])
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for key, parameter in peft.named_parameters():
                if ".lora_magnitude_vector." in key:
                    parameter *= torch.rand(parameter.shape, generator=generator) + 0.5
                elif ".lora_" in key:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
        return cls(peft.eval(), names)  # type: ignore[arg-type]

    @contextmanager
    def only(self, row: int) -> Iterator[torch.nn.Module]:
        """The model with the adapter of a row; -1 is the base model."""
        if row < 0:
            with self.model.disable_adapter():
                yield self.model
        else:
            self.model.set_adapter(self.names[row])
            yield self.model

    def tables(self, sites: ModelSites) -> LoRATables:
        """The weights of all adapters, read out of PEFT's modules."""
        shape = (len(self.names), sites.num_columns)
        rank = torch.zeros(shape, dtype=torch.int32)
        offsets = [torch.full(shape, -1, dtype=torch.int64) for _ in range(3)]
        pieces: list[torch.Tensor] = []
        num_elements = 0
        for site in sites.sites:
            module: Any = self.model.base_model.model.get_submodule(sites.full_name(site.name))
            for row, name in enumerate(self.names):
                if name not in getattr(module, "lora_A", {}):
                    continue
                a, b = module.lora_A[name].weight, module.lora_B[name].weight * module.scaling[name]
                parts = [a, b]
                if name in module.lora_magnitude_vector:
                    norms = (module.base_layer.weight + b @ a).norm(dim=1)
                    parts.append(module.lora_magnitude_vector[name].weight / norms)
                rank[row, site.column] = len(a)
                for offset, part in zip(offsets, parts, strict=False):
                    offset[row, site.column] = num_elements
                    num_elements += part.numel()
                    pieces.append(part.detach().flatten())
        return LoRATables(torch.cat(pieces), rank, *offsets, int(rank.max()))


@dataclass
class Decoding:
    """A source, the decoder's tokens after it, and the number of these in the cache. adapter: -1 for the base model."""

    source_ids: list[int]
    token_ids: list[int]
    adapter: int = -1
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    source_blocks: list[int] = field(default_factory=list)


class SourceRunner:
    """Feeds sources and sequences through a model. Blocks are handed out in random order; the cache starts as NaN."""

    def __init__(
        self,
        model: Model,
        tables: LoRATables | None = None,
        num_blocks: int = 96,
        block_size: int = 4,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: of the cache, None for the model's."""
        dtype = dtype or model.dtype
        shape = only_group(model.kv_groups).cache_shape(num_blocks * block_size, dtype)
        self._model, self._tables, self._block_size = model, tables, block_size
        poison = float("nan") if dtype.is_floating_point else -1
        self._cache = KVCache(*(torch.full(shape, poison, dtype=dtype) for _ in range(2)))
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def step(self, work: Sequence[tuple[Decoding, int]]) -> list[torch.Tensor]:
        """Encode the sources that are new, and compute the next `n` tokens of each sequence.

        Returns their logits [n, vocab_size] in the order of `work`.
        """
        order = sorted(range(len(work)), key=lambda i: work[i][1] > 1)
        batch = self.batch([work[i] for i in order])
        with torch.inference_mode():
            logits = self._model.forward(batch, self._cache)
        parts = dict(zip(order, logits.split(batch.query_lens), strict=True))
        return [parts[i] for i in range(len(work))]

    def batch(self, work: Sequence[tuple[Decoding, int]]) -> ForwardBatch:
        """Of sequences whose decodes come first."""
        new = [decoding for decoding, _ in work if not decoding.source_blocks]
        rows = [(d, p) for d, n in work for p in range(d.num_computed, d.num_computed + n)]
        for decoding, n in work:
            decoding.num_computed += n
            self._claim(decoding.blocks, decoding.num_computed)
            self._claim(decoding.source_blocks, len(decoding.source_ids))
        token_ids, slots = [d.token_ids[p] for d, p in rows], [self._slot(d.blocks, p) for d, p in rows]
        return ForwardBatch(
            input_ids=torch.tensor(token_ids),
            positions=torch.tensor([p for _, p in rows]),
            slot_mapping=torch.tensor(slots),
            query_lens=[n for _, n in work],
            context_lens=[d.num_computed for d, _ in work],
            num_keys=torch.tensor([d.num_computed for d, _ in work]),
            query_starts=torch.tensor([0, *(n for _, n in work)]).cumsum(0),
            block_tables=_padded([d.blocks for d, _ in work]),
            num_decodes=sum(n == 1 for _, n in work),
            logits_indices=torch.arange(len(rows)),
            block_size=self._block_size,
            lora=self._loras([d.adapter for d, _ in rows]),
            cross=CrossAttention(
                block_tables=_padded([d.source_blocks for d, _ in rows]),
                num_keys=torch.tensor([len(d.source_ids) for d, _ in rows]),
                query_starts=torch.arange(len(rows) + 1),
                new=self._sources(new) if new else None,
            ),
        )

    def _sources(self, new: Sequence[Decoding]) -> SourceBatch:
        rows = [(d, p) for d in new for p in range(len(d.source_ids))]
        return SourceBatch(
            input_ids=torch.tensor([d.source_ids[p] for d, p in rows]),
            slot_mapping=torch.tensor([self._slot(d.source_blocks, p) for d, p in rows]),
            lens=[len(d.source_ids) for d in new],
            lora=self._loras([d.adapter for d, _ in rows]),
        )

    def _loras(self, mapping: list[int]) -> TokenLoRAs | None:
        if self._tables is None or max(mapping) < 0:
            return None
        return TokenLoRAs(self._tables, torch.tensor(mapping))

    def _claim(self, blocks: list[int], num_tokens: int) -> None:
        while len(blocks) * self._block_size < num_tokens:
            blocks.append(self._free.pop())

    def _slot(self, blocks: list[int], position: int) -> int:
        return blocks[position // self._block_size] * self._block_size + position % self._block_size


def _padded(tables: Sequence[list[int]]) -> torch.Tensor:
    width = max(map(len, tables)) + 1
    return torch.tensor([blocks + [-1] * (width - len(blocks)) for blocks in tables])


def random_tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def save_t5_tokenizer(path: Path) -> Path:
    """Write a tokenizer of `VOCAB_SIZE` pieces, T5's, into `path`, which is returned. It ends sources with `</s>`."""
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0)]
    letters = "abcdefghijklmnopqrstuvwxyzäöüß0123456789.,!?'-"
    pieces = [
        "\u2581",
        *letters,
        *(f"\u2581{letter}" for letter in letters),
        "\u2581the",
        "\u2581der",
        "ing",
        "en",
        "\u2581a\u2581b",
    ]
    vocab = specials + [(piece, -4.0 - len(piece) / 8) for piece in pieces]
    vocab += [(f"<{i}>", -20.0) for i in range(len(vocab), VOCAB_SIZE)]
    T5Tokenizer(vocab=vocab, extra_ids=0).save_pretrained(path)
    return path


def run_alone(model: Model, decoding: Decoding) -> torch.Tensor:
    """The logits of all tokens of one sequence, which is computed in one step."""
    (logits,) = SourceRunner(model).step([(decoding, len(decoding.token_ids))])
    return logits


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, decoding: Decoding) -> torch.Tensor:
    """Those of transformers, [num_tokens, vocab_size]."""
    source, tokens = torch.tensor([decoding.source_ids]), torch.tensor([decoding.token_ids])
    logits: torch.Tensor = model(input_ids=source, decoder_input_ids=tokens, use_cache=False).logits[0]
    return logits


def assert_as_transformers_reads(path: Path) -> None:
    """The engine computes the logits that transformers computes of the same files."""
    reference = AutoModelForSeq2SeqLM.from_pretrained(path, local_files_only=True).eval()
    decoding = Decoding(random_tokens(40, 1), random_tokens(31, 2))
    logits = run_alone(load_model(path, Placement(torch.float32, torch.float32, torch.device("cpu"))), decoding)
    torch.testing.assert_close(logits, reference_logits(reference, decoding), atol=2e-4, rtol=1e-4)


def change_json(path: Path, changes: Mapping[str, Any], keeps_none: bool = False) -> dict[str, Any]:
    """Set fields of a file, and remove those that are None unless `keeps_none`. Returns the new content."""
    content = {**json.loads(path.read_text()), **changes}
    if not keeps_none:
        content = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(content))
    return content
