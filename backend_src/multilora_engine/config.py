"""`EngineConfig`: every parameter of the engine, its default, and every check that needs only the parameters.

The parameters of adapters are in `lora_config`. Checks that need the device, its memory, the checkpoint or a
directory are where the engine reads these (engine/build.py, engine/memory.py, lora/disk_tier.py). They raise
`ConfigError`, too.

The values come from the `parameters` block of `model_repository/generation/config.pbtxt` as strings. An empty value, or
one that is only a reference to an unset environment variable (`${NAME}`), means the default. An unknown name or an
impossible value raises `ConfigError` with a message that names a value to write.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from multilora_engine.errors import ConfigError
from multilora_engine.lora_config import LoRAConfig
from multilora_wire.checkpoint_directory import why_no_checkpoint

ModelImplementation = Literal["auto", "native", "transformers"]
_Switch = Literal["auto"] | bool
_LEAST_HANG_TIMEOUT_S = 1.0
_LARGEST_NUMBER = 2**62
"""The largest number of any parameter: messages between the processes hold 64 bits."""
_ADVICE = {
    "byte_size": "write bytes, or a size like 4GiB",
    "byte_size_unit": "write bytes, or a size like 4GiB",
    "bool_parsing": "write true or false",
    "int_parsing": "write a whole number",
    "float_parsing": "write a number",
}
"""The advice for values of a wrong type, by pydantic's types of errors."""
_ENVIRONMENT_REFERENCE = re.compile(r"\$\{(\w+)\}")


class EngineConfig(BaseModel):
    """All parameters of the engine. Frozen: a derived value lives in the class that derives it.

    Fields without a description are no parameters: only tests and scripts set them, as arguments.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_path: Annotated[
        Path, Field(description="Directory of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer).")
    ]
    engine: Annotated[
        str,
        Field(
            pattern=r"^(local|dynamo://[\w-]+(/[\w-]+/[\w-]+)?)$",
            description="`local`, or a Dynamo fleet: `dynamo://NAMESPACE`, optionally with `/COMPONENT/ENDPOINT`.",
        ),
    ] = "local"
    tokenizer_path: Annotated[Path | None, Field(description="Directory of the tokenizer. Empty: `model_path`.")] = None
    model_implementation: Annotated[
        ModelImplementation,
        Field(
            description="Whose layers compute: `native`, the engine's; `transformers`, any decoder's that it knows; "
            "`auto`: the engine's where it has them."
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="`auto`: the GPU of this instance, or the CPU without one.")
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="Type of the model's arithmetic. `auto`: the checkpoint's type on a GPU, float32 on a CPU."),
    ] = "auto"
    weight_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="Type of stored weights. `auto`: the checkpoint's type on a CPU in float32, else `dtype`."),
    ] = "auto"
    num_threads: Annotated[int, Field(ge=0, le=1024, description="CPU threads of the engine. 0: one per core.")] = 0
    max_model_len: Annotated[
        int, Field(ge=0, description="Most tokens of prompt and answer together. 0: the checkpoint's own limit.")
    ] = 0
    max_num_seqs: Annotated[int, Field(ge=1, le=4096, description="Sequences that may run at once.")] = 64
    max_num_batched_tokens: Annotated[
        int,
        Field(
            ge=0,
            description="Tokens of one step: decodes first, then prompts in chunks. 0: 2048 on a GPU, 256 on a CPU.",
        ),
    ] = 0
    max_num_encoder_tokens: Annotated[
        int,
        Field(
            ge=0,
            description="Tokens that an encoder reads in one step; a longer source is refused. 0: "
            "`max_num_batched_tokens`.",
        ),
    ] = 0
    max_queue_size: Annotated[
        int, Field(ge=1, description="Most requests that may wait; more are refused with UNAVAILABLE.")
    ] = 4096
    min_priority: Annotated[
        int,
        Field(
            ge=-(2**31),
            le=2**31 - 1,
            description="Smallest `priority` that a request may have; smaller values are raised to it.",
        ),
    ] = 0
    api_keys_file: Annotated[
        Path | None,
        Field(description="JSON file of API keys, one of them needed by every request (SECURITY.md). Empty: no keys."),
    ] = None
    client_header_secret_file: Annotated[
        Path | None,
        Field(
            description="File with the secret that the proxy writes before a name in `x-multilora-client`. Empty: none."
        ),
    ] = None
    stop_needs_sender: Annotated[
        bool,
        Field(description="An anonymous client may stop a request only by the `stop_id` that the server gave."),
    ] = False
    inter_token_latency_target_ms: Annotated[
        Literal["auto"] | Annotated[float, Field(ge=0)],
        Field(
            description="Longest step, in ms, while answers run; prompts may use a third of it. `auto`: 2.5 times a "
            "step without prompts (2 times in a burst or beside other clients); 0: off."
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool, Field(description="Reuse keys and values of a prompt's beginning for later prompts of the same adapter.")
    ] = True
    kv_cache_memory_bytes: Annotated[
        ByteSize,
        Field(ge=0, description="Bytes of the KV cache. 0: all memory left on a GPU, 1 GiB on a CPU."),
    ] = ByteSize(0)
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8", "fp8"],
        Field(description="Type of cached keys and values. `auto`: `dtype`; int8 and fp8 have scales by head."),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1, description="Share of the GPU's memory that the engine may use.")
    ] = 0.9
    request_timeout_s: Annotated[
        float, Field(gt=0, description="Seconds after which a request ends, even if its client waits.")
    ] = 600.0
    engine_hang_timeout_s: Annotated[
        float,
        Field(ge=0, description="Seconds without a sign of life before the engine is killed and restarted. 0: never."),
    ] = 30.0
    add_special_tokens: Annotated[
        bool, Field(description="Whether the tokenizer adds its special tokens (such as BOS) to `text_input`.")
    ] = True
    special_tokens_in_messages: Annotated[
        bool,
        Field(
            description="Whether special tokens spelt in a chat's texts (`<|im_end|>`) count as such; false: "
            "plain text."
        ),
    ] = True
    exclude_input_in_output: Annotated[
        bool, Field(description="Default of the input of this name: leave the prompt out of one-response answers.")
    ] = False
    lora: LoRAConfig = LoRAConfig()
    block_size: int = 0
    """Tokens of one block of the KV cache. 0: the device's, 16 of a CPU and 64 of a GPU."""
    enable_cuda_graphs: _Switch = "auto"
    """Replay a GPU's steps as CUDA graphs. `auto`: if the graphs pass the self-test at start."""
    enable_async_scheduling: _Switch = "auto"
    """Prepare a step while the step before computes. `auto`: on a GPU."""

    @model_validator(mode="after")
    def _check_together(self) -> EngineConfig:
        if reason := why_no_checkpoint(self.model_path):
            raise ValueError(f"model_path: {reason}")
        if self.tokenizer_path is not None and not self.tokenizer_path.is_dir():
            raise ValueError(
                f"tokenizer_path: {self.tokenizer_path} is no directory; write one with a tokenizer, or nothing for "
                "model_path"
            )
        for name, value in (*self, *self.lora):
            if isinstance(value, int) and value > _LARGEST_NUMBER:
                raise ValueError(f"{name}: {value} is beyond {_LARGEST_NUMBER}; write a smaller number")
        if 0 < self.engine_hang_timeout_s < _LEAST_HANG_TIMEOUT_S:
            raise ValueError(
                f"engine_hang_timeout_s: {self.engine_hang_timeout_s:g} s are shorter than a healthy engine's pauses; "
                f"write {_LEAST_HANG_TIMEOUT_S:g} or more, or 0 for never"
            )
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_seqs: {self.max_num_seqs} sequences cannot each get one token of max_num_batched_tokens "
                f"{self.max_num_batched_tokens}; write max_num_seqs <= max_num_batched_tokens"
            )
        return self

    @property
    def is_fleet(self) -> bool:
        """Whether a fleet generates, instead of an engine on this machine."""
        return self.engine != "local"

    @property
    def fleet_endpoint(self) -> tuple[str, str, str]:
        """Namespace, component and endpoint of the fleet's workers."""
        namespace, *rest = self.engine.removeprefix("dynamo://").split("/")
        component, endpoint = rest or ("backend", "generate")
        return namespace, component, endpoint

    @property
    def inter_token_latency_target_s(self) -> float | None:
        """`inter_token_latency_target_ms` in seconds; None for `auto`."""
        target_ms = self.inter_token_latency_target_ms
        return None if target_ms == "auto" else target_ms / 1e3

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str], environ: Mapping[str, str] | None = None) -> EngineConfig:
        """Read the string parameters of config.pbtxt. Raises ConfigError."""
        values = {
            name: text
            for name, raw in parameters.items()
            if (text := _expand(raw, os.environ if environ is None else environ).strip())
        }
        for name in sorted(_RETIRED.keys() & values.keys()):
            raise ConfigError(f"parameter {name} is gone: {_RETIRED[name]}; remove it from config.pbtxt")
        known = set(parameter_descriptions())
        if unknown := sorted(set(values) - known):
            raise ConfigError(unknown_parameters(unknown, sorted(known)))
        if "model_path" not in values:
            raise ConfigError("parameter model_path is empty; write the directory of a Hugging Face checkpoint")
        lora_names = set(LoRAConfig.model_fields)
        try:
            lora = LoRAConfig.model_validate({k: v for k, v in values.items() if k in lora_names})
            engine = {k: v for k, v in values.items() if k not in lora_names}
            return cls.model_validate({**engine, "lora": lora})
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None


_RETIRED = {
    "stream_interval": "every token of a stream has a response of its own",
    "block_size": "a block of the KV cache has 16 tokens on a CPU, 64 on a GPU",
    "enable_cuda_graphs": "a GPU replays its steps as CUDA graphs if the graphs pass the self-test at start",
    "enable_async_scheduling": "a GPU computes a step while the next one is prepared",
    "max_uploads_per_client": "a known client may send 8 adapters at once",
    "max_beam_width": "a request may have 8 beams",
    "max_prompt_bytes": "the text of a prompt may have 4 MiB",
    "allow_slow_operators": "a GPU operator that fails the self-test stops the load",
    "max_queue_share": "one client may hold half of max_queue_size",
    "max_sequences_per_request": "a request may have 512",
    "max_prompt_tokens_per_request": "a request may have 524288",
    "max_prompt_log_probs_per_request": "a request may have 1048576",
    "max_words_per_request": "a request may have 4096",
    "max_word_bytes_per_request": "a request may have 131072",
    "max_biases_per_request": "a request may have 65536",
    "max_guides_per_request": "a request may have 16",
    "max_guide_bytes_in_flight": "the guides of all requests may take 128 MiB",
    "guide_compile_timeout_s": "the guide of a request has 30 s to compile",
    "host_work_ms_per_step": "words, guides and beams may take 50 ms of a step",
    "max_prompt_wait_s": "a prompt that has waited for 10 s goes before later ones",
    "max_metadata_bytes": "the parameters of a request may have 65536",
    "max_logits_bytes": "a request may have 64 MiB",
    "max_streamed_logits_bytes": "a streamed request may have 16 MiB",
    "max_logits_bytes_in_flight": "all requests at a model may have 256 MiB",
    "lora_fetch_threads": "4 adapters are fetched at once",
    "unpacked_weights_memory_bytes": "the operation `weights` takes the memory that all else leaves",
    "unpacked_weights": "`multilora weights unpack` switches modules while the server runs",
    "lora_metrics_max_adapters": "32 adapters have metrics of their own",
}
"""Parameters of earlier versions, each with what the server does now."""


def parameter_descriptions() -> dict[str, tuple[object, str]]:
    """name -> (default, description) of every parameter of config.pbtxt, in the order of the documentation."""
    fields = {**EngineConfig.model_fields, **LoRAConfig.model_fields}
    return {
        name: (None if field.is_required() else field.default, field.description or "")
        for name, field in fields.items()
        if field.description is not None
    }


def unknown_parameters(names: Sequence[str], known: Sequence[str]) -> str:
    """The message about names that are not among the `known` ones, with the near ones."""
    near = {name: difflib.get_close_matches(name, known, 3) for name in names}
    told = [f"{name}, did you mean {' or '.join(found)}?" if found else name for name, found in near.items()]
    return f"unknown parameter {'; '.join(told)} (docs/configuration.md has a list)"


def path_parameters() -> list[str]:
    """The parameters that name files or directories."""
    fields = {**EngineConfig.model_fields, **LoRAConfig.model_fields}
    return [name for name, field in fields.items() if Path in (field.annotation, *get_args(field.annotation))]


def _expand(text: str, environ: Mapping[str, str]) -> str:
    return _ENVIRONMENT_REFERENCE.sub(lambda match: environ.get(match.group(1), ""), text)


def _explain(error: ValidationError) -> str:
    """The mistakes, by parameter. A parameter of several types has a mistake for each type."""
    parts: dict[str, list[str]] = {}
    for item in error.errors():
        message = _ADVICE.get(item["type"], item["msg"].removeprefix("Value error, "))
        name = f" {_name_of(item['loc'])}={item['input']!r}:" if item["loc"] else ""
        parts.setdefault(f"parameter{name}", []).append(message)
    return "; ".join(f"{name} {', or '.join(messages)}" for name, messages in parts.items())


def _name_of(place: tuple[int | str, ...]) -> str:
    """The name of a parameter, or of a value in a list. Without the type that pydantic adds to some names."""
    is_in_list = len(place) > 1 and isinstance(place[1], int)
    return ".".join(map(str, place if is_in_list else place[:1]))


CPU_STEP_TOKENS = 256
"""Tokens of a step on a CPU: a chunk of a prompt takes some hundred milliseconds."""

_GPU_STEP_TOKENS = 2048
"""Tokens of a step on a GPU: with fewer tokens, a step waits for weights rather than for arithmetic."""

_CPU_MAX_LORAS = 32

_CPU_BLOCK_SIZE, _GPU_BLOCK_SIZE = 16, 64
"""A GPU's attention takes the keys of a block in one tile, and finds them by one entry of a block table."""

LEAST_HOST_TIER_BYTES = 1 << 30

_GPU_PARAMETERS = ("gpu_memory_utilization", "lora_cache_gpu_memory_fraction")
"""Shares of a GPU's memory."""


def idle_parameters(config: EngineConfig) -> list[str]:
    """The parameters, as they are written, that are of a GPU alone, where the CPU serves."""
    values, defaults = dict([*config, *config.lora]), parameter_descriptions()
    return [f"{name}={values[name]:g}" for name in _GPU_PARAMETERS if values[name] != defaults[name][0]]


def on_device(config: EngineConfig, device: str) -> EngineConfig:
    """The configuration with the device's numbers in place of 0, and the device's choices in place of `auto`.

    A GPU's `enable_cuda_graphs` stays `auto` until the graphs have been tried. device: "cpu", "cuda" or "cuda:0".
    Raises ConfigError for CUDA graphs that are demanded of a CPU.
    """
    is_gpu = device.startswith("cuda")
    if config.enable_cuda_graphs is True and not is_gpu:
        raise ConfigError("parameter enable_cuda_graphs=true: the CPU serves, and has no graphs; write auto or false")
    num_tokens = config.max_num_batched_tokens or max(
        config.max_num_seqs, _GPU_STEP_TOKENS if is_gpu else CPU_STEP_TOKENS
    )
    max_loras = config.max_num_seqs if is_gpu else _CPU_MAX_LORAS
    lora = config.lora.model_copy(update={"max_loras": config.lora.max_loras or max_loras})
    has_auto_scheduling, has_auto_graphs = (
        value == "auto" for value in (config.enable_async_scheduling, config.enable_cuda_graphs)
    )
    return config.model_copy(
        update={
            "max_num_batched_tokens": num_tokens,
            "max_num_encoder_tokens": config.max_num_encoder_tokens or num_tokens,
            "lora": lora,
            "block_size": config.block_size or (_GPU_BLOCK_SIZE if is_gpu else _CPU_BLOCK_SIZE),
            "enable_async_scheduling": is_gpu if has_auto_scheduling else config.enable_async_scheduling,
            "enable_cuda_graphs": False if has_auto_graphs and not is_gpu else config.enable_cuda_graphs,
        }
    )
