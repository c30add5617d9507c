"""The fields of a `PreprocessedRequest`, which Dynamo's front sends with a prompt, as far as a worker reads them.

In a struct that chooses tokens or their number an unknown field is an error: ignoring it would change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class GuidedDecoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """json: a schema, as an object or as its text. choice: the answer is one of these. backend: names another engine's
    library, where ours has but one. whitespace_pattern, structural_tag: refused if present."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    backend: str | None = None
    whitespace_pattern: str | None = None
    structural_tag: Any = None


class SamplingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None: the client did not set it. top_k -1 and 0: no restriction. include_stop_str_in_output: for the front, which
    writes the text. length_penalty: of beam searches, which are refused."""

    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    temperature: _NotNegative | None = None
    top_p: _Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    min_p: _Probability | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: GuidedDecoding | None = None


class StopConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """stop_token_ids_hidden: tokens that end the answer and are not part of it, among them the checkpoint's end tokens.

    stop_token_ids_visible: tokens that end the answer as its last one. stop_token_ids: the tokens that a client named.
    """

    max_tokens: _Count | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_visible: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    min_tokens: _Count | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: int | None = None


class OutputOptions(msgspec.Struct, frozen=True):
    """logprobs, prompt_logprobs: how many of the likeliest tokens beside each one of the answer, of the prompt; 0: the
    token alone. The other fields are for the front alone."""

    logprobs: _Count | None = None
    prompt_logprobs: _Count | None = None


class Routing(msgspec.Struct, frozen=True):
    """lora_name: the adapter that answers. priority: larger ones first. cache_salt: only requests with the same one
    share blocks of the prefix cache."""

    lora_name: str | None = None
    priority: int | None = None
    cache_salt: str | None = None


class WorkerRequest(msgspec.Struct, frozen=True):
    """model: the name that the client asked for, the base model's or an adapter's."""

    token_ids: list[int]
    model: str = ""
    sampling_options: SamplingOptions | None = None
    stop_conditions: StopConditions | None = None
    output_options: OutputOptions | None = None
    routing: Routing | None = None
    multi_modal_data: Any = None
    prompt_embeds: Any = None

    @property
    def lora_name(self) -> str:
        """Empty for the base model."""
        return (self.routing and self.routing.lora_name) or ""

    @property
    def cache_salt(self) -> str:
        """Empty for none."""
        return (self.routing and self.routing.cache_salt) or ""
