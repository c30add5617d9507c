"""`EngineInfo`: the facts that the fronts must know of a running engine.

In a module of its own, so that the fronts need not import the engine's own packages (seconds and hundreds of MB each).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from multilora_wire.layout import AdapterLayout

if TYPE_CHECKING:
    from pathlib import Path

    from multilora_engine.config import EngineConfig


@dataclass(frozen=True)
class CallLimits:
    """The most that one request may ask for, or one client at once.

    max_prompt_bytes: of the text or the chat of one prompt, and of the text that the chat template makes of a chat.
    max_sequences_per_request: rows of a request times `num_return_sequences` or beams.
    max_prompt_tokens_per_request: a prompt counts once for each of its sequences.
    max_prompt_log_probs_per_request: prompt tokens with log-probs, times one more than the likeliest told of each.
    max_words_per_request, max_word_bytes_per_request: stop words and bad words over all sequences; bytes are of UTF-8,
        and of int32 for words that are ids.
    max_biases_per_request: tokens with an `embedding_bias`, over all sequences.
    max_guides_per_request: different guides.
    max_metadata_bytes: parameters of a request, headers among them, as JSON.
    max_logits_bytes, max_streamed_logits_bytes: while a model sends logits, its other answers wait.
    max_logits_bytes_in_flight: of all requests at one model.
    max_uploads_per_client: adapters that a known client may send at once; unknown clients share room for as many.
    max_beam_width: each beam takes one of `max_num_seqs` places.
    """

    max_prompt_bytes: int = 4 << 20
    max_sequences_per_request: int = 512
    max_prompt_tokens_per_request: int = 1 << 19
    max_prompt_log_probs_per_request: int = 1 << 20
    max_words_per_request: int = 4096
    max_word_bytes_per_request: int = 128 << 10
    max_biases_per_request: int = 1 << 16
    max_guides_per_request: int = 16
    max_metadata_bytes: int = 64 << 10
    max_logits_bytes: int = 64 << 20
    max_streamed_logits_bytes: int = 16 << 20
    max_logits_bytes_in_flight: int = 256 << 20
    max_uploads_per_client: int = 8
    max_beam_width: int = 8


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
class SourceFacts:
    """The facts about the sources of an encoder-decoder model, and about the beginnings of its answers.

    max_tokens: the longest source; None as long as only the model's own positions are known, and these have no end.
    decoder_start_token_id: the decoder's text begins with it, unless a request says otherwise.
    forced_first_token_id: the first token after that beginning, which is one of the answer; None lets the model choose.
    forced_last_token_id: the last token of an answer that is as long as it may become; None lets the model choose.
    pad_token_id: upstream's preprocessing sends this one token as a beginning that nobody has given.
    """

    max_tokens: int | None
    decoder_start_token_id: int
    forced_first_token_id: int | None
    forced_last_token_id: int | None
    pad_token_id: int

    def longest(self, max_num_encoder_tokens: int) -> int:
        """Tokens of the longest source, where a step encodes so many tokens at most."""
        return min(max_num_encoder_tokens, self.max_tokens or max_num_encoder_tokens)


@dataclass(frozen=True)
class EngineInfo:
    """The facts about a running engine that its fronts need: plain values, so that it travels between processes.

    version: of the engine, `read_version`. model_implementation: who computes the layers, `native` or `transformers`.
    source: None for a model without an encoder.
    """

    model_path: str
    tokenizer_path: str
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    add_special_tokens: bool
    exclude_input_in_output: bool
    special_tokens_in_messages: bool
    limits: CallLimits
    max_adapter_bytes: int
    adapter_layout: AdapterLayout
    kv_cache_tokens: int
    device: str
    dtype: str
    kv_cache_dtype: str
    version: str
    clients: ClientPolicy = ClientPolicy()
    model_implementation: str = "native"
    source: SourceFacts | None = None


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.absolute())


def read_version() -> str:
    """The version of the installed package; the engine also runs from its folder alone, which has none."""
    try:
        return metadata.version("multilora-engine")
    except metadata.PackageNotFoundError:
        return "unknown"
