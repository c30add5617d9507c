"""`EngineInfo`: the facts that the fronts must know of a running engine.

In a module of its own, so that the fronts need not import the engine's own packages (seconds and hundreds of MB each).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import metadata
from typing import TYPE_CHECKING

from multilora_wire.layout import AdapterLayout

if TYPE_CHECKING:
    from pathlib import Path

    from multilora_engine.config import EngineConfig


@dataclass(frozen=True)
class CallLimits:
    """The most that one request may ask for: the parameters of these names."""

    max_prompt_bytes: int
    max_sequences_per_request: int
    max_prompt_tokens_per_request: int
    max_prompt_log_probs_per_request: int
    max_words_per_request: int
    max_word_bytes_per_request: int
    max_biases_per_request: int
    max_guides_per_request: int
    max_metadata_bytes: int
    max_logits_bytes: int
    max_streamed_logits_bytes: int
    max_logits_bytes_in_flight: int

    @classmethod
    def of(cls, config: EngineConfig) -> CallLimits:
        return cls(**{field.name: int(getattr(config, field.name)) for field in fields(cls)})


@dataclass(frozen=True)
class ClientPolicy:
    """How the fronts tell clients apart, and the rights of each.

    api_keys_file, client_header_secret_file: absolute paths, empty where there is none. min_priority,
    stop_needs_sender: the parameters of these names.
    """

    api_keys_file: str = ""
    client_header_secret_file: str = ""
    min_priority: int = 0
    stop_needs_sender: bool = False

    @classmethod
    def of(cls, config: EngineConfig) -> ClientPolicy:
        return cls(
            api_keys_file=_absolute(config.api_keys_file),
            client_header_secret_file=_absolute(config.client_header_secret_file),
            min_priority=config.min_priority,
            stop_needs_sender=config.stop_needs_sender,
        )


@dataclass(frozen=True)
class EngineInfo:
    """The facts about a running engine that its fronts need: plain values, so that it travels between processes.

    version: of the engine, `read_version`.
    """

    model_path: str
    tokenizer_path: str
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    add_special_tokens: bool
    exclude_input_in_output: bool
    special_tokens_in_messages: bool
    stream_interval: int
    limits: CallLimits
    max_adapter_bytes: int
    max_uploads_per_client: int
    adapter_layout: AdapterLayout
    kv_cache_tokens: int
    device: str
    dtype: str
    kv_cache_dtype: str
    version: str
    clients: ClientPolicy = ClientPolicy()


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.absolute())


def read_version() -> str:
    """The version of the installed package; the engine also runs from its folder alone, which has none."""
    try:
        return metadata.version("multilora-engine")
    except metadata.PackageNotFoundError:
        return "unknown"
