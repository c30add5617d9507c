"""Parses a request to a generation model: generate, store an adapter, or stop; and checks how much it asks for.

All sequences of a request go to the engine together, and all requests share the loop of the engine.

Defaults of sampling follow TensorRT-LLM's Triton backend and its clients: greedy unless asked otherwise,
`runtime_top_p` <= 0 is unset, `runtime_top_k` 0 is no restriction, `end_id` -1 is no end token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from msgspec.structs import replace

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.lora.names import SetMember
from multilora_engine.request import UNWRITTEN, Guide, GuideType, SamplingParams
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.sent_adapter import (
    SentAdapter,
    check_adapter_tensors,
    has_weights,
    read_adapter,
    read_expected_digest,
    read_set,
    read_task_id,
)
from multilora_engine.serving.token_lists import (
    check_chat,
    encode_beginning,
    encode_messages,
    encode_text,
    read_bad_sequences,
    read_bias,
    read_sequences,
    read_words,
    word_bytes,
)
from multilora_engine.serving.unsupported import refuse_unsupported
from multilora_engine.text.tokenizer import TemplateRefusal, Tokenizer
from multilora_wire.adapter_names import MAX_SESSION_BYTES
from multilora_wire.adapter_use import NO_USE, AdapterUse, parse_use, use_digest


@dataclass(frozen=True)
class GenerateCall:
    """One prompt a row, all answered together, each by `num_sequences` answers: drawn, or the best of its beams.

    sources: of each row, the tokens that the encoder reads; empty for a model without one. With an encoder the prompt
    is the beginning of the decoder's text.
    lora_names: of each row, empty without one; the task id that goes with it is in `lora_task_ids`. lora_starts: the
    positions from which on their adapters compute, None without one.
    lora_sets: of each row, the members of a set; empty for any other adapter.
    lora_paths: of each row, the place of the adapter's files, empty without one.
    chats: of each row, its chat if an adapter answers, which is written anew if the adapter has another use than the
    one of `chat_uses`; see `GenerationRequest.chat_use`.
    lora_expected_digests: of each row, the digest that its adapter must have, empty for any.
    lora_sessions: of each row, the session that keeps its member of an alias, empty without one.
    priorities: of each row, smaller ones first.
    """

    prompts: list[list[int]]
    sources: list[list[int]]
    num_sequences: int
    sampling: list[SamplingParams]
    lora_task_ids: list[int | None]
    lora_names: list[str]
    lora_starts: list[int | None]
    lora_sets: list[tuple[SetMember, ...]]
    lora_paths: list[str]
    lora_expected_digests: list[str]
    lora_sessions: list[str]
    priorities: list[int]
    adapter: SentAdapter | None
    is_streaming: bool
    excludes_input: bool
    pad_id: int
    returns_perf: bool
    returns_kv_cache: bool
    vocab_size: int
    chats: list[AdapterChat | None] = field(default_factory=list)
    chat_uses: list[str | None] = field(default_factory=list)

    @property
    def is_search(self) -> bool:
        """Whether beam search answers."""
        return self.sampling[0].beam_width > 1

    @property
    def requests_per_row(self) -> int:
        """How many requests a row is to the engine."""
        return 1 if self.is_search else self.num_sequences


@dataclass(frozen=True)
class AdapterChat:
    """The chat of a row that an adapter answers: its prompt and its options depend on the adapter's use."""

    inputs: InputTensors
    row: int

    def read(self, use: AdapterUse, info: EngineInfo, tokenizer: Tokenizer) -> tuple[list[int], SamplingParams]:
        """The prompt by the adapter's use, and the options with its defaults. Raises InvalidRequest."""
        sampling = read_sampling(self.inputs, self.row, info, tokenizer, use)
        text, asked = _chat_text(self.inputs, self.row), self.inputs.scalar("add_special_tokens", self.row)
        assert text is not None, "a row with a chat"
        try:
            prompt = encode_messages(text, tokenizer, info, bool(asked), use)
        except TemplateRefusal as error:
            if not use.has_own_template:
                raise
            name = self.inputs.text("lora_name", self.row) or read_task_id(self.inputs, self.row)
            raise TemplateRefusal(f"adapter {name}: {error}") from None
        return _truncated(prompt, self.inputs, self.row, sampling.max_tokens, info), sampling


@dataclass(frozen=True)
class _ReadRow:
    """A row's prompt and options. chat_use: as of `GenerationRequest`."""

    prompt: list[int]
    sampling: SamplingParams
    chat: AdapterChat | None = None
    chat_use: str | None = None


_NO_PROMPT = [0]
"""Stands for a prompt that is not written yet."""

UseOf = Callable[[int, str], str]
"""The use, as of `AdapterTraits.use`, that the adapter of a task id and a name had when it was last heard of."""


@dataclass(frozen=True)
class UploadCall:
    """Store an adapter and generate nothing.

    expected_digest: the digest of the version that the new one replaces, empty for any version or none.
    """

    adapter: SentAdapter
    lora_name: str
    expected_digest: str


_PROMPTS = ("text_input", "messages", "input_ids")
_LEFT_CHAT = "left_messages"
"""A chat that `preprocessing` left to this model, because an adapter answers; `input_lengths` is 0 then."""

_MAX_SEQUENCES = 128
"""Answers to one prompt; each is a request to the engine."""


def is_stop(inputs: InputTensors) -> bool:
    """Whether a request only wants the requests of its own id to end; its other tensors are dummies."""
    return inputs.common("stop", default=False)


def read_call(
    inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer, use_of: UseOf = lambda lora_task_id, lora_name: ""
) -> GenerateCall | UploadCall:
    """Raises InvalidRequest or Unsupported. Only a `SentAdapter` keeps memory of the request's weights."""
    refuse_unsupported(inputs, info.source is not None)
    check_adapter_tensors(inputs)
    if has_weights(inputs) and not inputs.present(*_PROMPTS, *MAX_TOKENS):
        if "lora_start" in inputs:
            raise InvalidRequest("lora_start goes with a prompt, and the request only stores an adapter")
        name = inputs.text("lora_name", 0) or ""
        return UploadCall(read_adapter(inputs, info, tokenizer), name, read_expected_digest(inputs, 0))
    return _read_generate(inputs, info, tokenizer, use_of)


def renders_own_template(inputs: InputTensors, use_of: UseOf) -> bool:
    """Whether reading a request renders a chat by what the tenant of an adapter wrote, which may take seconds."""
    present = inputs.present(*_PROMPTS, _LEFT_CHAT)
    for row in range(inputs.num_rows(present[0]) if present else 0):
        task_id = None if read_set(inputs, row) else read_task_id(inputs, row)
        if task_id is None or _chat_text(inputs, row) is None:
            continue
        if parse_use(use_of(task_id, inputs.text("lora_name", row) or "")).has_own_template:
            return True
    return False


def _read_generate(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer, use_of: UseOf) -> GenerateCall:
    rows = range(inputs.num_rows(_prompt_name(inputs)))
    read = _read_rows(inputs, len(rows), info, tokenizer, use_of)
    sampling = [row.sampling for row in read]
    is_streaming = inputs.common("streaming", default=False)
    texts = [row.prompt for row in read]
    beginnings = []
    if info.source is not None:
        beginnings = [_read_beginning(inputs, row, info, tokenizer) for row in rows]
        starts = [beginning == [info.source.decoder_start_token_id] for beginning in beginnings]
        first, last = info.source.forced_first_token_id, info.source.forced_last_token_id
        sampling = [
            replace(s, forced_first_id=first if is_start else None, forced_last_id=last)
            for s, is_start in zip(sampling, starts, strict=True)
        ]
    return GenerateCall(
        sampling=sampling,
        num_sequences=_read_num_sequences(inputs, _beam_width(sampling, is_streaming)),
        prompts=beginnings or texts,
        sources=texts if beginnings else [[] for _ in rows],
        chats=[row.chat for row in read],
        chat_uses=[row.chat_use for row in read],
        lora_task_ids=[read_task_id(inputs, row) for row in rows],
        lora_names=[inputs.text("lora_name", row) or "" for row in rows],
        lora_starts=[inputs.scalar("lora_start", row) for row in rows],
        lora_sets=[read_set(inputs, row) for row in rows],
        lora_paths=[inputs.text("lora_path", row) or "" for row in rows],
        lora_expected_digests=[read_expected_digest(inputs, row) for row in rows],
        lora_sessions=[_read_session(inputs, row) for row in rows],
        priorities=[inputs.scalar("priority", row) or 0 for row in rows],
        is_streaming=is_streaming,
        excludes_input=inputs.common("exclude_input_in_output", default=info.exclude_input_in_output),
        pad_id=_read_pad_id(inputs, info),
        vocab_size=info.vocab_size,
        returns_perf=inputs.common("return_perf_metrics", default=False),
        returns_kv_cache=inputs.common("return_kv_cache_reuse_stats", default=False),
        adapter=read_adapter(inputs, info, tokenizer) if has_weights(inputs) else None,
    )


def _prompt_name(inputs: InputTensors) -> str:
    present = inputs.present(*_PROMPTS)
    if len(present) != 1:
        found = " and ".join(present) or "none of them"
        raise InvalidRequest(f"a request needs exactly one of {', '.join(_PROMPTS)}; it has {found}")
    return present[0]


def _read_rows(
    inputs: InputTensors, num_rows: int, info: EngineInfo, tokenizer: Tokenizer, use_of: UseOf
) -> list[_ReadRow]:
    kept: InputTensors | None = None
    rows = []
    for row in range(num_rows):
        task_id = None if read_set(inputs, row) else read_task_id(inputs, row)
        if task_id is None or _chat_text(inputs, row) is None:
            sampling = read_sampling(inputs, row, info, tokenizer)
            prompt = _read_prompt(inputs, row, info, tokenizer)
            rows.append(_ReadRow(_truncated(prompt, inputs, row, sampling.max_tokens, info), sampling))
            continue
        kept = kept or inputs.without_weights()
        use = use_of(task_id, inputs.text("lora_name", row) or "")
        rows.append(_read_chat(AdapterChat(kept, row), use, info, tokenizer))
    return rows


def _read_chat(chat: AdapterChat, use: str, info: EngineInfo, tokenizer: Tokenizer) -> _ReadRow:
    """A chat by the use that its adapter is believed to have. Raises InvalidRequest.

    A base model may have no template, or none for such a chat, where the adapter has one; and a chat may leave out what
    the adapter has a default for.
    """
    inputs, row = chat.inputs, chat.row
    check_chat(_chat_text(inputs, row) or "", info)
    own = parse_use(use)
    if inputs.present(*MAX_TOKENS) or own.max_tokens is not None:
        try:
            return _ReadRow(*chat.read(own, info, tokenizer), chat, use_digest(use))
        except TemplateRefusal:
            sampling = read_sampling(inputs, row, info, tokenizer, own)
    else:
        least = max(1, inputs.scalar("min_tokens", row) or 1)
        sampling = read_sampling(inputs, row, info, tokenizer, AdapterUse(max_tokens=least))
    return _ReadRow(_NO_PROMPT, sampling, chat, UNWRITTEN)


def _chat_text(inputs: InputTensors, row: int) -> str | None:
    """The chat of a row, as JSON; None without one."""
    if _LEFT_CHAT in inputs and inputs.scalar("input_lengths", row) == 0:
        return inputs.text(_LEFT_CHAT, row)
    return inputs.text("messages", row)


def _read_prompt(inputs: InputTensors, row: int, info: EngineInfo, tokenizer: Tokenizer) -> list[int]:
    asked = inputs.scalar("add_special_tokens", row)
    if (text := inputs.text("text_input", row)) is not None:
        return encode_text(text, tokenizer, info, info.add_special_tokens if asked is None else asked)
    if (messages := _chat_text(inputs, row)) is not None:
        return encode_messages(messages, tokenizer, info, bool(asked))
    if asked is not None:
        raise InvalidRequest("add_special_tokens goes with text_input or messages: input_ids are tokens already")
    token_ids = _read_ids(inputs, "input_ids", "input_lengths", row)
    if not token_ids:
        raise InvalidRequest("empty prompt: input_ids holds no tokens")
    return token_ids


def _read_session(inputs: InputTensors, row: int) -> str:
    session = inputs.text("lora_session", row) or ""
    if (num_bytes := len(session.encode())) > MAX_SESSION_BYTES:
        raise InvalidRequest(f"lora_session has {num_bytes} bytes, at most {MAX_SESSION_BYTES} are accepted")
    return session


def _read_ids(inputs: InputTensors, name: str, name_of_length: str, row: int) -> list[int]:
    """The token ids of a row, without those that fill it up."""
    token_ids: list[int] = inputs.vector(name, row) or []
    length = inputs.scalar(name_of_length, row)
    if length is not None and not 0 <= length <= len(token_ids):
        raise InvalidRequest(f"{name_of_length} is {length}, expected 0 .. {len(token_ids)}, the width of {name}")
    return token_ids[:length]


def _read_beginning(inputs: InputTensors, row: int, info: EngineInfo, tokenizer: Tokenizer) -> list[int]:
    """The tokens of the decoder before its answer, for a model with an encoder.

    A single pad token is upstream's sign that nothing was given.
    """
    assert info.source is not None, "the model has an encoder"
    token_ids: list[int] = []
    if "decoder_input_ids" in inputs:
        token_ids = _read_ids(inputs, "decoder_input_ids", "decoder_input_lengths", row)
        if token_ids in ([info.source.pad_token_id], [inputs.scalar("pad_id", row)]):
            token_ids = []
    elif (inputs.scalar("decoder_input_lengths", row) or 0) > 1:
        raise InvalidRequest("decoder_input_lengths goes with decoder_input_ids, which are missing")
    text = encode_beginning("decoder_text_input", inputs.text("decoder_text_input", row) or "", tokenizer, info)
    if token_ids and text:
        raise InvalidRequest("decoder_input_ids and decoder_text_input both begin the answer; send one")
    return token_ids or text or [info.source.decoder_start_token_id]


def _truncated(prompt: list[int], inputs: InputTensors, row: int, max_tokens: int, info: EngineInfo) -> list[int]:
    """The end of a prompt that `truncate_prompt_tokens` keeps; -1: as many as leave room for `max_tokens`.

    Of a source no more than the encoder takes, whatever the length of the answer.
    """
    num_tokens = in_range(inputs, "truncate_prompt_tokens", row, -1, math.inf)
    if num_tokens is None:
        return prompt
    if num_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens is 0, expected -1 (as many as there is room for) or a number > 0")
    if num_tokens == -1 and info.source is not None:
        num_tokens = info.source.max_tokens or len(prompt)
    elif num_tokens == -1 and (num_tokens := info.max_model_len - max_tokens) < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens is -1, and max_tokens {max_tokens} leaves no room for a prompt: max_model_len is "
            f"{info.max_model_len}"
        )
    return prompt[-num_tokens:]


def _beam_width(sampling: list[SamplingParams], is_streaming: bool) -> int:
    widths = {row.beam_width for row in sampling}
    if len(widths) > 1:
        raise InvalidRequest(f"beam_width is {_listed(widths)}; it must be the same in every row of a request")
    if is_streaming and widths != {1}:
        raise Unsupported(
            f"beam_width {widths.pop()} together with streaming: until the search ends, other beams may replace those "
            "found; send streaming false, or beam_width 1"
        )
    return widths.pop()


def _read_num_sequences(inputs: InputTensors, beam_width: int) -> int:
    """The number of answers; of a beam search at most, and unless told otherwise, all beams."""
    name = "num_return_sequences"
    rows = range(inputs.num_rows(name)) if name in inputs else range(0)
    most = beam_width if beam_width > 1 else _MAX_SEQUENCES
    counts = {in_range(inputs, name, row, 1, most) for row in rows} or {beam_width}
    if len(counts) > 1:
        raise InvalidRequest(f"{name} is {_listed(counts)}; it must be the same in every row of a request")
    return int(counts.pop())


def _listed(values: Iterable[float]) -> str:
    """`1 and 4`"""
    return " and ".join(map(str, sorted(values)))


def _read_pad_id(inputs: InputTensors, info: EngineInfo) -> int:
    """The token that fills up shorter rows of `output_ids`: `pad_id`, `end_id`, the model's end token, or 0."""
    candidates = (inputs.scalar("pad_id", 0), inputs.scalar("end_id", 0), *info.end_token_ids)
    return next((token_id for token_id in candidates if token_id is not None and token_id >= 0), 0)


_LOGIT_BYTES = 4
"""Logits are float32."""


def check_call(call: GenerateCall, info: EngineInfo, can_stream: bool = False) -> None:
    """Raises InvalidRequest, with the numbers, for a request that asks for more than the engine's limits.

    can_stream: whether the request is to a model that streams.
    """
    limits, width = info.limits, call.sampling[0].beam_width
    num_sequences = len(call.prompts) * (width if call.is_search else call.num_sequences)
    _check("sequences", num_sequences, limits.max_sequences_per_request)
    num_prompt_tokens = sum(map(len, [*call.prompts, *call.sources])) * call.requests_per_row
    _check("prompt tokens", num_prompt_tokens, limits.max_prompt_tokens_per_request)
    _check("prompt log-probs", _num_prompt_log_probs(call), limits.max_prompt_log_probs_per_request)
    _check("stop words and bad words", _total(call, _num_words), limits.max_words_per_request)
    _check("bytes of stop words and bad words", _total(call, _num_word_bytes), limits.max_word_bytes_per_request)
    _check("biases", _total(call, lambda sampling: len(sampling.embedding_bias)), limits.max_biases_per_request)
    num_guides = len({sampling.guide for sampling in call.sampling} - {None})
    _check("different guides", num_guides, limits.max_guides_per_request)
    most_logits = (
        min(limits.max_logits_bytes, limits.max_streamed_logits_bytes) if can_stream else limits.max_logits_bytes
    )
    _check("bytes of logits", logits_bytes(call, info), most_logits)


def logits_bytes(call: GenerateCall, info: EngineInfo) -> int:
    """The largest size, in bytes, of the logits that a request asks for."""
    num_rows = 0
    for prompt, sampling in zip(call.prompts, call.sampling, strict=True):
        num_answered = max(0, min(sampling.max_tokens, info.max_model_len - len(prompt)))
        num_rows += sampling.return_context_logits * len(prompt) + sampling.return_generation_logits * num_answered
    return num_rows * call.requests_per_row * info.vocab_size * _LOGIT_BYTES


def _num_prompt_log_probs(call: GenerateCall) -> int:
    rows = zip(call.prompts, call.sampling, strict=True)
    wanted = [(prompt, sampling) for prompt, sampling in rows if sampling.return_prompt_log_probs]
    return call.requests_per_row * sum(len(prompt) * (1 + s.num_prompt_top_log_probs) for prompt, s in wanted)


def _total(call: GenerateCall, count: Callable[[SamplingParams], int]) -> int:
    """The total over all sequences; the beams of a search count once."""
    return sum(map(count, call.sampling)) * call.requests_per_row


def _num_words(sampling: SamplingParams) -> int:
    return len(sampling.stop_words) + len(sampling.stop_token_sequences) + len(sampling.bad_token_sequences)


def _num_word_bytes(sampling: SamplingParams) -> int:
    return word_bytes(sampling.stop_words, sampling.stop_token_sequences + sampling.bad_token_sequences)


def _check(noun: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidRequest(f"the request has {number} {noun} in all; a request may have {most}: send it in parts")


MAX_TOKENS = ("max_tokens", "request_output_len")


class _Defaults:
    """The options of a row, for which an adapter may have defaults.

    An option of the request comes first, unless `default_inputs` names it among the client's own defaults. A
    temperature of 1 alone, which upstream's text clients always send, asks for nothing.
    """

    def __init__(self, inputs: InputTensors, row: int, use: AdapterUse) -> None:
        self._inputs, self._row, self._use = inputs, row, use
        self._weak = {*inputs.texts("default_inputs", row)}
        if not inputs.present("runtime_top_k", "runtime_top_p", "min_p") and inputs.scalar("temperature", row) == 1.0:
            self._weak.add("temperature")
        self._is_search = (inputs.scalar("beam_width", row) or 1) > 1

    def number(self, name: str, field: str, low: float, high: float) -> Any:
        """The value of an option that chooses tokens. Nothing is drawn in a beam search."""
        asked = in_range(self._inputs, name, self._row, low, high)
        own = None if self._is_search and field != "repetition_penalty" else getattr(self._use, field)
        return own if own is not None and (asked is None or name in self._weak) else asked

    def max_tokens(self) -> int:
        own, given = self._use.max_tokens, self._inputs.present(*MAX_TOKENS)
        return own if own is not None and self._weak.issuperset(given) else _read_max_tokens(self._inputs, self._row)


def read_sampling(
    inputs: InputTensors, row: int, info: EngineInfo, tokenizer: Tokenizer, use: AdapterUse = NO_USE
) -> SamplingParams:
    """The options of a row. use: of the adapter that answers its chat, for its defaults. Raises InvalidRequest."""
    defaults = _Defaults(inputs, row, use)
    max_tokens = defaults.max_tokens()
    temperature = defaults.number("temperature", "temperature", 0.0, math.inf)
    top_p = defaults.number("runtime_top_p", "top_p", -math.inf, 1.0)
    top_p = top_p if top_p is not None and top_p > 0 else None
    num_top_log_probs = in_range(inputs, "num_top_log_probs", row, 0, math.inf) or 0
    num_prompt_top_log_probs = in_range(inputs, "num_prompt_top_log_probs", row, 0, math.inf) or 0
    min_p = defaults.number("min_p", "min_p", 0.0, 1.0) or 0.0
    top_k = defaults.number("runtime_top_k", "top_k", 0, math.inf)
    repetition_penalty = defaults.number("repetition_penalty", "repetition_penalty", 0.0, math.inf)
    if top_k is None:
        # Upstream's text clients always send a temperature of 1, which alone changes nothing there.
        top_k = 1 if temperature in (None, 1.0) and top_p is None and not min_p else 0
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=in_range(inputs, "min_tokens", row, 0, max_tokens) or 0,
        min_tokens_holds_stops=inputs.scalar("min_tokens_holds_stops", row) or False,
        temperature=1.0 if temperature is None else temperature,
        top_k=top_k,
        top_p=1.0 if top_p is None else top_p,
        top_p_decay=_default(_positive(inputs, "runtime_top_p_decay", row, 1.0), 1.0),
        top_p_min=_default(_positive(inputs, "runtime_top_p_min", row, 1.0), 1e-6),
        top_p_reset_id=_default(in_range(inputs, "runtime_top_p_reset_ids", row, -1, math.inf), -1),
        min_p=min_p,
        repetition_penalty=_default(_above_zero("repetition_penalty", repetition_penalty), 1.0),
        presence_penalty=in_range(inputs, "presence_penalty", row, -math.inf, math.inf) or 0.0,
        frequency_penalty=in_range(inputs, "frequency_penalty", row, -math.inf, math.inf) or 0.0,
        embedding_bias=read_bias(inputs, row, info, tokenizer),
        bad_token_sequences=read_bad_sequences(inputs, row, tokenizer, info.limits),
        seed=inputs.scalar("seed", row),
        end_id=_read_end_id(inputs, row, info),
        end_ids=use.end_token_ids,
        # Upstream's own examples send one empty stop word where they mean none.
        stop_words=tuple(word for word in read_words(inputs, "stop_words", row, info.limits) if word),
        stop_token_sequences=read_sequences(inputs, "stop_words_list", row, info.limits),
        include_stop_str_in_output=inputs.scalar("include_stop_str_in_output", row) or False,
        return_log_probs=inputs.common("return_log_probs", default=False) or num_top_log_probs > 0,
        num_top_log_probs=num_top_log_probs,
        return_context_logits=inputs.common("return_context_logits", default=False),
        return_generation_logits=inputs.common("return_generation_logits", default=False),
        return_prompt_log_probs=inputs.common("return_prompt_log_probs", default=False) or num_prompt_top_log_probs > 0,
        num_prompt_top_log_probs=num_prompt_top_log_probs,
        guide=_read_guide(inputs, row),
        guide_after_thinking=inputs.scalar("guided_decoding_after_thinking", row) or False,
        beam_width=in_range(inputs, "beam_width", row, 1, math.inf) or 1,
        length_penalty=in_range(inputs, "len_penalty", row, -math.inf, math.inf) or 0.0,
        early_stopping=int(_default(inputs.scalar("early_stopping", row), True)),
        beam_search_diversity_rate=in_range(inputs, "beam_search_diversity_rate", row, -math.inf, math.inf) or 0.0,
    )


def _read_guide(inputs: InputTensors, row: int) -> Guide | None:
    kind, text = inputs.text("guided_decoding_guide_type", row), inputs.text("guided_decoding_guide", row)
    if kind is None and text is None:
        return None
    kinds: tuple[GuideType, ...] = get_args(GuideType)
    if kind == "structural_tag":
        raise Unsupported(f"guided_decoding_guide_type structural_tag; this server guides by {', '.join(kinds)}")
    if kind not in kinds:
        raise InvalidRequest(f"guided_decoding_guide_type is {kind}, expected one of {', '.join(kinds)}")
    if text is None and kind != "json":
        raise InvalidRequest(f"guided_decoding_guide is missing; a guide of type {kind} needs it")
    return Guide(kind, "" if kind == "json" or text is None else text)


def _read_max_tokens(inputs: InputTensors, row: int) -> int:
    values = {name: in_range(inputs, name, row, 0, math.inf) for name in inputs.present(*MAX_TOKENS)}
    if not values:
        raise InvalidRequest("max_tokens is missing; say how many tokens the answer may have")
    if len(set(values.values())) > 1:
        raise InvalidRequest(
            f"{' and '.join(f'{name} {value}' for name, value in values.items())} contradict each other"
        )
    return int(values.popitem()[1])


def _read_end_id(inputs: InputTensors, row: int, info: EngineInfo) -> int | None:
    """An id beyond the vocabulary is none: upstream's token client sends GPT-2's, 50256, unless it is told another."""
    end_id: int | None = in_range(inputs, "end_id", row, -1, math.inf)
    return -1 if end_id is not None and end_id >= info.vocab_size else end_id


def in_range(inputs: InputTensors, name: str, row: int, low: float, high: float) -> Any:
    value = inputs.scalar(name, row)
    # Written so that NaN fails it; infinities are no value of any of these tensors.
    if value is not None and not (low <= value <= high and math.isfinite(value)):
        raise InvalidRequest(f"{name} is {value}, expected {_range(low, high)}")
    return value


def _positive(inputs: InputTensors, name: str, row: int, high: float) -> float | None:
    return _above_zero(name, in_range(inputs, name, row, 0.0, high))


def _above_zero(name: str, value: float | None) -> float | None:
    if value == 0.0:
        raise InvalidRequest(f"{name} is 0, expected a number > 0")
    return value


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _range(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return "a finite number"
    if math.isinf(high):
        return f"a number >= {low:g}"
    return f"a number <= {high:g}" if math.isinf(low) else f"a number in [{low:g}, {high:g}]"
