"""transformers + PEFT as the oracle: random adapters on a model, and what greedy decoding must give."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import LlamaConfig, LlamaForCausalLM

from multilora_engine.lora.format import pack_peft
from multilora_engine.lora.layout import PackedAdapter
from multilora_wire.layout import AdapterLayout
from multilora_wire.peft_files import open_peft_directory

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]

_ORDER = (*ATTENTION[:3], "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "c_fc", "down_proj", "c_proj")


class Oracle:
    """A transformers model with any number of PEFT adapters, each also on disk as PEFT saves it."""

    def __init__(self, model: torch.nn.Module, directory: Path) -> None:
        self._base = model.eval()
        # Here, because PEFT puts adapted linears into modules of its own.
        self._linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        self._model: PeftModel | None = None
        self._directory = directory
        self.adapters: dict[str, Path] = {}

    def linears(self, part: str) -> list[str]:
        """The names of the linears in the first layer's `self_attn` or `mlp`, as the model has them, in order."""
        names = [name.rpartition(".")[2] for name in self._linears if name.startswith(f"model.layers.0.{part}.")]
        return sorted(names, key=_ORDER.index)

    def load(self, name: str, directory: Path) -> None:
        """An adapter that somebody trained."""
        if self._model is None:
            self._model = PeftModel.from_pretrained(self._base, str(directory), adapter_name=name)
        else:
            self._model.load_adapter(str(directory), adapter_name=name)
        self._model.to(torch.float32)
        self.adapters[name] = directory

    def add_random(self, name: str, rank: int, target_modules: list[str], seed: int, **options: Any) -> None:
        """An adapter of random numbers, large enough to change every greedy answer."""
        self.add(name, LoraConfig(r=rank, lora_alpha=rank, target_modules=target_modules, **options), seed)

    def add(self, name: str, config: PeftConfig, seed: int, **saving: Any) -> None:
        """An adapter of random numbers of any kind. saving: options of `save_pretrained`."""
        if self._model is None:
            self._model = PeftModel(self._base, config, adapter_name=name)
        else:
            self._model.add_adapter(name, config)
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in self._model.named_parameters():
            if f".lora_B.{name}." in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
            if f".lora_A.{name}." in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.08
            if f".lora_magnitude_vector.{name}." in key:
                parameter.data *= torch.rand(parameter.shape, generator=generator) + 0.5
            if f".lora_embedding_A.{name}" in key or f".lora_embedding_B.{name}" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
            if f".trainable_tokens_delta.{name}" in key:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
            if f".modules_to_save.{name}." in key:
                places = torch.randperm(len(parameter), generator=generator)[:: len(parameter) // 20]
                parameter.data[places] = torch.randn(len(places), parameter.shape[1], generator=generator) * 0.3
        self._model.save_pretrained(str(self._directory), selected_adapters=[name], **saving)
        self.adapters[name] = self._directory / name

    @torch.no_grad()
    def logits(
        self, adapter: str | None, prompt: list[int], answer: list[int], start: int | None = None
    ) -> torch.Tensor:
        """The logits that choose each token of `answer`, [len(answer), vocab].

        start: the position from which on an activated adapter computes.
        """
        token_ids = torch.tensor([prompt + answer[:-1]])
        # PEFT counts from the end.
        offsets = {} if start is None else {"alora_offsets": [token_ids.shape[1] - start]}
        with self._only(adapter) as model:
            logits: torch.Tensor = model(input_ids=token_ids, **offsets).logits[0, len(prompt) - 1 :]
        return logits

    def generate(self, adapter: str | None, prompt: list[int], **options: Any) -> Any:
        """What transformers' `generate` returns."""
        with self._only(adapter) as model:
            token_ids = torch.tensor([prompt])
            return model.generate(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **options)  # type: ignore[operator]

    @contextmanager
    def _only(self, adapter: str | None) -> Iterator[torch.nn.Module]:
        assert self._model is not None
        if adapter is None:
            with self._model.disable_adapter():
                yield self._model
        else:
            self._model.set_adapter(adapter)
            yield self._model


class Oracles:
    """As `Oracle`, with a copy of the model for each adapter: PEFT lets no two of some kinds share a model."""

    def __init__(self, model: torch.nn.Module, directory: Path) -> None:
        self._model, self._directory = model.eval(), directory
        self._of: dict[str | None, Oracle] = {}
        self.adapters: dict[str, Path] = {}

    def add(self, name: str, config: PeftConfig, seed: int, **saving: Any) -> None:
        """See `Oracle.add`."""
        oracle = Oracle(copy.deepcopy(self._model), self._directory)
        oracle.add(name, config, seed, **saving)
        self._of[name] = self._of[None] = oracle
        self.adapters[name] = oracle.adapters[name]

    def logits(self, adapter: str | None, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """See `Oracle.logits`."""
        return self._of[adapter].logits(adapter, prompt, answer)

    def generate(self, adapter: str | None, prompt: list[int], **options: Any) -> Any:
        """See `Oracle.generate`."""
        return self._of[adapter].generate(adapter, prompt, **options)


def tiny_llama_oracle(directory: Path) -> tuple[Oracle, Path]:
    """A Llama of two layers, without adapters yet, and its checkpoint. Both are folders of `directory`."""
    torch.manual_seed(7)
    shape = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=311, max_position_embeddings=512, initializer_range=0.4, **shape))
    model.save_pretrained(directory / "checkpoint")
    (directory / "adapters").mkdir()
    return Oracle(model, directory / "adapters"), directory / "checkpoint"


def packed(directory: Path, layout: AdapterLayout, base_model: Path | None = None) -> PackedAdapter:
    """A PEFT directory the way a client sends it: its files as they are. base_model: needed for DoRA."""
    with open_peft_directory(directory, layout.sites) as adapter:
        return pack_peft(adapter, layout, base_model or Path("/nowhere"))
