"""Reads the requests of Dynamo's front: a prompt and the options of its answer.

The structs are the fields of a `PreprocessedRequest` that a worker reads. In a struct that chooses tokens or their
number an unknown field is an error: ignoring it would change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.lora.names import task_id_of
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.serving.request_parser import GenerateCall, check_call
from multilora_engine.serving.structured_outputs import StructuredOutputs, read_guide

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


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
    guided_decoding: StructuredOutputs | None = None


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


_PROBE_PRIORITY = -(1 << 31)
"""Smaller than any priority that clients may have."""


def read_request(request: Mapping[str, Any]) -> WorkerRequest:
    """The fields of a request. Raises InvalidRequest for a malformed one, and Unsupported for inputs but text."""
    try:
        read = msgspec.convert(request, WorkerRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request cannot be read: {error}") from None
    for name, value in (("images, videos or audio", read.multi_modal_data), ("prompt_embeds", read.prompt_embeds)):
        if value:
            raise Unsupported(f"{name}; this engine takes tokens")
    return read


def engine_request(
    request: WorkerRequest, request_id: str, info: EngineInfo, is_probe: bool = False
) -> GenerationRequest:
    """The request to the engine, under the id `request_id`. Raises InvalidRequest or Unsupported.

    is_probe: the request is Dynamo's canary, which goes before all others: a busy worker is not broken.
    """
    if info.source is not None:
        raise Unsupported("a model with an encoder; ask for it through Triton, or by multilora openai")
    lora_name = request.lora_name
    # Dynamo serves larger priorities first, the engine smaller ones.
    priority = -((request.routing and request.routing.priority) or 0)
    sampling = read_sampling(request, info)
    check_call(_call_of(request, sampling, info), info)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=request.token_ids,
        sampling=sampling,
        lora_task_id=task_id_of(lora_name) if lora_name else None,
        priority=_PROBE_PRIORITY if is_probe else max(priority, info.clients.min_priority),
        lora_name=lora_name,
        # Prompts of different salts share no blocks, as prompts of different tenants share none.
        sender=Sender(tenant=request.cache_salt),
        # Dynamo's front has written a chat by the base model's template, and does not tell chats from texts.
        chat_use="" if lora_name else None,
    )


def read_sampling(request: WorkerRequest, info: EngineInfo) -> SamplingParams:
    """The way an answer's tokens are chosen. Omitted values are OpenAI's defaults: temperature is 1.

    Raises InvalidRequest or Unsupported.
    """
    options = request.sampling_options or SamplingOptions()
    stops = request.stop_conditions or StopConditions()
    output = request.output_options or OutputOptions()
    _check_num_answers(options)
    if stops.max_thinking_tokens is not None:
        raise Unsupported("max_thinking_tokens; this engine does not know which tokens are thoughts")
    max_tokens = info.max_model_len if stops.max_tokens is None else stops.max_tokens
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_min_tokens(stops, max_tokens),
        min_tokens_holds_stops=True,
        temperature=1.0 if options.temperature is None else options.temperature,
        top_k=max(0, options.top_k or 0),
        # Other engines read a top_p of 0 as the one likeliest token, too.
        top_p=1.0 if options.top_p is None else max(options.top_p, 1e-6),
        min_p=options.min_p or 0.0,
        repetition_penalty=1.0 if options.repetition_penalty is None else options.repetition_penalty,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        seed=options.seed,
        end_id=-1 if stops.ignore_eos else None,
        stop_words=tuple(word for word in stops.stop or [] if word),
        stop_token_sequences=_stop_tokens(stops, info),
        # The front cuts the text itself, and needs the tokens of the stop word to find it; the engine only ends there.
        include_stop_str_in_output=True,
        guide=None if options.guided_decoding is None else read_guide(options.guided_decoding, "guided_decoding"),
        return_log_probs=output.logprobs is not None,
        num_top_log_probs=output.logprobs or 0,
        return_prompt_log_probs=output.prompt_logprobs is not None,
        num_prompt_top_log_probs=output.prompt_logprobs or 0,
    )


def _min_tokens(stops: StopConditions, max_tokens: int) -> int:
    min_tokens = stops.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens}, expected 0 .. {max_tokens}, which is max_tokens")
    return min_tokens


def _stop_tokens(stops: StopConditions, info: EngineInfo) -> tuple[tuple[int, ...], ...]:
    """The tokens that end an answer besides the checkpoint's end tokens, which the engine knows."""
    asked = {*(stops.stop_token_ids or []), *(stops.stop_token_ids_visible or []), *(stops.stop_token_ids_hidden or [])}
    return tuple((token_id,) for token_id in sorted(asked - set(info.end_token_ids)))


def _check_num_answers(options: SamplingOptions) -> None:
    """Dynamo's front ends a stream with the first finish reason in it, so that further answers would be cut off."""
    for name in ("n", "best_of"):
        if (value := getattr(options, name)) not in (None, 1):
            raise Unsupported(f"{name} {value}; a request through Dynamo has one answer: send it {value} times")
    if options.use_beam_search:
        raise Unsupported("use_beam_search; a request through Dynamo has one answer, and it is drawn")


def _call_of(request: WorkerRequest, sampling: SamplingParams, info: EngineInfo) -> GenerateCall:
    """The same call as from Triton's doors, to which the same limits apply."""
    return GenerateCall(
        prompts=[request.token_ids],
        sources=[[]],
        num_sequences=1,
        sampling=[sampling],
        lora_task_ids=[None],
        lora_names=[""],
        lora_starts=[None],
        lora_sets=[()],
        lora_paths=[""],
        lora_expected_digests=[""],
        lora_sessions=[""],
        priorities=[0],
        adapter=None,
        is_streaming=True,
        excludes_input=True,
        pad_id=0,
        returns_perf=False,
        returns_kv_cache=False,
        vocab_size=info.vocab_size,
    )
