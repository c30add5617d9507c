"""The families that are served: how each reads `config.json`, and its layers.

To add one: a file with a function that adds the family's numbers to a `ModelConfig`, and an `Architecture` whose layers
are made of the pieces in `layers.py` or are a class of their own; a row in `FAMILIES`; a tiny random model of it in
tests/engine/models/test_decoder.py and tests/engine/test_parity.py, which compare with transformers and PEFT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multilora_engine.errors import ConfigError
from multilora_engine.models import cohere2, gemma, glm4, llama, olmo2, phi3, starcoder2
from multilora_engine.models.decoder import Architecture, Decoder, sites_of
from multilora_engine.models.hf_config import HFConfig, read_hf_config
from multilora_engine.models.model import Model
from multilora_engine.models.model_config import ModelConfig, check_shape, decoder_config, read_json
from multilora_engine.models.weights import WeightFormat
from multilora_wire.checkpoint_directory import why_no_checkpoint
from multilora_wire.sites import ModelSites


@dataclass(frozen=True)
class Family:
    """model_type: the field of config.json beside the architecture's name.

    fields: of config.json, with the family's defaults.
    read: gets the fields and the numbers that all decoders share, and adds the family's.
    may_turn_in_part: whether the family has `partial_rotary_factor`; transformers ignores it in the others.
    """

    model_type: str
    fields: type[HFConfig]
    read: Callable[[Any, ModelConfig], ModelConfig]
    architecture: Architecture
    may_turn_in_part: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", llama.LlamaConfig, llama.read_llama, llama.LLAMA),
    "MistralForCausalLM": Family("mistral", llama.MistralConfig, llama.read_llama, llama.LLAMA),
    "Qwen2ForCausalLM": Family("qwen2", llama.Qwen2Config, llama.read_qwen2, llama.LLAMA),
    "Qwen3ForCausalLM": Family("qwen3", llama.Qwen3Config, llama.read_llama, llama.QWEN3),
    "GraniteForCausalLM": Family("granite", llama.GraniteConfig, llama.read_granite, llama.LLAMA),
    "SmolLM3ForCausalLM": Family("smollm3", llama.SmolLM3Config, llama.read_smollm3, llama.LLAMA),
    "Gemma2ForCausalLM": Family("gemma2", gemma.Gemma2Config, gemma.read_gemma2, gemma.GEMMA2),
    "Gemma3ForCausalLM": Family("gemma3_text", gemma.Gemma3Config, gemma.read_gemma3, gemma.GEMMA3),
    "Phi3ForCausalLM": Family("phi3", phi3.Phi3Config, phi3.read, phi3.PHI3, may_turn_in_part=True),
    "Olmo2ForCausalLM": Family("olmo2", olmo2.Olmo2Config, olmo2.read, olmo2.OLMO2),
    "GlmForCausalLM": Family("glm", glm4.GlmConfig, glm4.read, glm4.GLM, may_turn_in_part=True),
    "Glm4ForCausalLM": Family("glm4", glm4.Glm4Config, glm4.read, glm4.GLM4, may_turn_in_part=True),
    "Cohere2ForCausalLM": Family("cohere2", cohere2.Cohere2Config, cohere2.read, cohere2.COHERE2),
    "Starcoder2ForCausalLM": Family("starcoder2", starcoder2.Starcoder2Config, starcoder2.read, starcoder2.STARCODER2),
}
"""The families by the name in `architectures` of config.json."""


def read_model_config(path: Path) -> ModelConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a checkpoint directory.

    Raises ConfigError for a family, activation or rope type that is not served.
    """
    if reason := why_no_checkpoint(path):
        raise ConfigError(reason)
    raw = read_json(path / "config.json")
    name = _architecture_name(raw)
    hf = read_hf_config(raw, FAMILIES[name].fields)
    config = FAMILIES[name].read(hf, decoder_config(path, raw, hf, name))
    check_shape(config)
    if not FAMILIES[name].may_turn_in_part:
        _refuse_partial_ropes(config)
    return config


def build_model(config: ModelConfig, weights: WeightFormat) -> Model:
    """The model without weights yet, which will be stored as `weights` says."""
    return Decoder(config, FAMILIES[config.architecture].architecture, weights)


def adapter_sites(config: ModelConfig) -> ModelSites:
    """The linears, embeddings and head of a model that adapters may change, without the model."""
    return sites_of(config, FAMILIES[config.architecture].architecture)


def _architecture_name(raw: dict[str, Any]) -> str:
    """The one supported name in `architectures`, whose `model_type` must agree."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: architectures must be a list of names, got {names!r}")
    known = [name for name in names if name in FAMILIES and FAMILIES[name].model_type == raw.get("model_type")]
    if len(known) != 1 or len(names) != 1:
        raise ConfigError(
            f"config.json: architectures {names} with model_type {raw.get('model_type')!r} is not supported; "
            f"supported are: {', '.join(FAMILIES)}"
        )
    return str(known[0])


def _refuse_partial_ropes(config: ModelConfig) -> None:
    parts = {rope.rotary_dim / config.head_dim for rope in config.ropes.values()} - {1.0}
    if parts:
        raise ConfigError(
            f"config.json: partial_rotary_factor {parts.pop()} is not supported for {config.architecture}; "
            "supported is: 1.0"
        )
