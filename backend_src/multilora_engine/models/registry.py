"""The families that are served: how each reads `config.json`, and its layers.

To add one: a file with a function that adds the family's numbers to a `ModelConfig`, and an `Architecture` whose layers
are made of the pieces in `layers.py` or are a class of their own; a row in `FAMILIES`; a row in
`multilora_wire.config_sites` if its MLPs are not Llama's; a tiny random model of it in
tests/engine/models/test_decoder.py and tests/engine/test_parity.py, which compare with transformers and PEFT. A family
with an encoder has its row in `ENCODER_DECODERS`, and its tiny model in tests/support/encoder_decoders.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multilora_engine.config import ModelImplementation
from multilora_engine.errors import ConfigError
from multilora_engine.models import bart, cohere2, gemma, glm4, gpt_oss, llama, moe, olmo2, phi3, starcoder2, t5
from multilora_engine.models.decoder import Architecture, Decoder
from multilora_engine.models.encoder_decoder import EncoderDecoder, EncoderDecoderArchitecture
from multilora_engine.models.hf_config import begin_completing, check_sizes
from multilora_engine.models.model import Model
from multilora_engine.models.model_config import (
    ModelConfig,
    check_shape,
    decoder_config,
    read_json,
)
from multilora_engine.models.weights import WeightFormat
from multilora_wire.checkpoint_directory import why_no_checkpoint


def _as_all(_fields: Mapping[str, Any], config: ModelConfig) -> ModelConfig:
    return config


@dataclass(frozen=True)
class Family:
    """model_type: the field of config.json beside the architecture's name.

    read: gets the completed fields of config.json and the numbers that all decoders share. It returns the family's
        numbers.
    may_turn_in_part: whether the family has `partial_rotary_factor`; transformers ignores it in the others.
    """

    model_type: str
    architecture: Architecture
    read: Callable[[Mapping[str, Any], ModelConfig], ModelConfig] = _as_all
    may_turn_in_part: bool = False


@dataclass(frozen=True)
class EncoderDecoderFamily:
    """model_type: the field of config.json beside the architecture's name.

    read: gets the directory, the fields of config.json as they are and completed, and the architecture's name. It
        returns the family's numbers.
    """

    model_type: str
    architecture: EncoderDecoderArchitecture
    read: Callable[[Path, Mapping[str, Any], Mapping[str, Any], str], ModelConfig]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", llama.LLAMA),
    "MistralForCausalLM": Family("mistral", llama.LLAMA),
    "Qwen2ForCausalLM": Family("qwen2", llama.LLAMA, llama.read_qwen2),
    "Qwen3ForCausalLM": Family("qwen3", llama.QWEN3),
    "GraniteForCausalLM": Family("granite", llama.LLAMA, llama.read_granite),
    "SmolLM3ForCausalLM": Family("smollm3", llama.LLAMA, llama.read_smollm3),
    "Gemma2ForCausalLM": Family("gemma2", gemma.GEMMA2, gemma.read_gemma2),
    "Gemma3ForCausalLM": Family("gemma3_text", gemma.GEMMA3, gemma.read_gemma3),
    "Phi3ForCausalLM": Family("phi3", phi3.PHI3, may_turn_in_part=True),
    "Olmo2ForCausalLM": Family("olmo2", olmo2.OLMO2),
    "GlmForCausalLM": Family("glm", glm4.GLM, glm4.read, may_turn_in_part=True),
    "Glm4ForCausalLM": Family("glm4", glm4.GLM4, glm4.read, may_turn_in_part=True),
    "Cohere2ForCausalLM": Family("cohere2", cohere2.COHERE2, cohere2.read),
    "Starcoder2ForCausalLM": Family("starcoder2", starcoder2.STARCODER2, starcoder2.read),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", moe.QWEN3_MOE, moe.read_qwen3),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", moe.QWEN2_MOE, moe.read_qwen2),
    "OlmoeForCausalLM": Family("olmoe", moe.OLMOE, moe.read_olmoe),
    "MixtralForCausalLM": Family("mixtral", moe.MIXTRAL, moe.read_mixtral),
    "GptOssForCausalLM": Family("gpt_oss", gpt_oss.GPT_OSS, gpt_oss.read),
}
"""The families of decoders by the name in `architectures` of config.json."""

ENCODER_DECODERS: dict[str, EncoderDecoderFamily] = {
    "T5ForConditionalGeneration": EncoderDecoderFamily("t5", t5.T5, t5.read),
    "MT5ForConditionalGeneration": EncoderDecoderFamily("mt5", t5.T5, t5.read),
    "BartForConditionalGeneration": EncoderDecoderFamily("bart", bart.BART, bart.read),
    "MBartForConditionalGeneration": EncoderDecoderFamily("mbart", bart.MBART, bart.read),
}
"""The families of models with an encoder."""

_MODEL_TYPES = {name: family.model_type for name, family in (FAMILIES | ENCODER_DECODERS).items()}
"""The field of config.json beside the architecture's name."""


def read_model_config(path: Path, implementation: ModelImplementation = "native") -> ModelConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a checkpoint directory.

    implementation: who is to compute the layers. Raises ConfigError for a family, activation or rope type that is not
    served.
    """
    return begin_model_config(path, implementation)()


def begin_model_config(path: Path, implementation: ModelImplementation = "native") -> Callable[[], ModelConfig]:
    """Start a `read_model_config`. The returned function waits for the result; either call raises ConfigError."""
    if reason := why_no_checkpoint(path):
        raise ConfigError(reason)
    raw = read_json(path / "config.json")
    check_sizes(raw)
    if implementation == "transformers" or (implementation == "auto" and not _is_native(raw)):
        return lambda: _general_config(path, raw)
    name = _architecture_name(raw)
    wait = begin_completing(raw)
    return lambda: _model_config(path, raw, name, wait())


def _model_config(path: Path, raw: Mapping[str, Any], name: str, fields: Mapping[str, Any]) -> ModelConfig:
    if name in ENCODER_DECODERS:
        return ENCODER_DECODERS[name].read(path, raw, fields, name)
    config = FAMILIES[name].read(fields, decoder_config(path, raw, fields, name))
    check_shape(config)
    if not FAMILIES[name].may_turn_in_part:
        _refuse_partial_ropes(config)
    return config


def _general_config(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    # Here, as all of models/general: it imports transformers, which takes a second.
    from multilora_engine.models.general.config import read_general_config

    return read_general_config(path, raw)


def build_model(config: ModelConfig, weights: WeightFormat, tensor_names: Iterable[str] = ()) -> Model:
    """The model without weights yet, which will be stored as `weights` says. tensor_names: of the checkpoint."""
    if config.general is not None:
        from multilora_engine.models.general.model import GeneralModel

        return GeneralModel(config, config.general, weights, tensor_names)
    if config.encoder is not None:
        return EncoderDecoder(config, ENCODER_DECODERS[config.architecture].architecture, weights)
    return Decoder(config, FAMILIES[config.architecture].architecture, weights)


def check_model(model: Model) -> None:
    """Compare a loaded model of transformers' modules with transformers' own attention. Raises ConfigError."""
    if model.config.general is not None:
        from multilora_engine.models.general.probe import check_attention

        check_attention(model)


def _is_native(raw: Mapping[str, Any]) -> bool:
    """Whether the engine has layers of its own for one of the `architectures`."""
    names = raw.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name in _MODEL_TYPES and _MODEL_TYPES[name] == raw.get("model_type") for name in names
    )


def _architecture_name(raw: dict[str, Any]) -> str:
    """The one supported name in `architectures`, whose `model_type` must agree."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: architectures must be a list of names, got {names!r}")
    known = [name for name in names if name in _MODEL_TYPES and _MODEL_TYPES[name] == raw.get("model_type")]
    if len(known) != 1 or len(names) != 1:
        raise ConfigError(
            f"config.json: architectures {names} with model_type {raw.get('model_type')!r} is not supported; "
            f"supported are: {', '.join(_MODEL_TYPES)}"
        )
    return str(known[0])


def _refuse_partial_ropes(config: ModelConfig) -> None:
    parts = {rope.rotary_dim / config.head_dim for rope in config.ropes.values()} - {1.0}
    if parts:
        raise ConfigError(
            f"config.json: partial_rotary_factor {parts.pop()} is not supported for {config.architecture}; "
            "supported is: 1.0"
        )
