"""What a request to `generation` or `generation_unary` asks for: generate, store an adapter, or stop.

Defaults follow TensorRT-LLM's Triton backend and its clients: greedy unless asked otherwise, `runtime_top_p` <= 0
is unset, `runtime_top_k` 0 is no restriction, `end_id` -1 is no end token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.request import Guide, GuideType, SamplingParams
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.prompts import encode_messages, encode_text
from multilora_engine.serving.token_lists import read_bad_sequences, read_bias, read_sequences, read_words
from multilora_engine.serving.unsupported import refuse_unsupported
from multilora_engine.text.tokenizer import Tokenizer

_PROMPTS = ("text_input", "messages", "input_ids")
_MAX_TOKENS = ("max_tokens", "request_output_len")
_WEIGHTS = ("lora_weights", "lora_weights_bf16", "lora_weights_fp32")

_MAX_SEQUENCES = 128
"""Answers to one prompt; each is a request to the engine."""


@dataclass(frozen=True)
class GenerateCall:
    """One prompt a row, all answered together, each by `num_sequences` answers: drawn, or the best of its beams.

    adapter: task id and weights that came with the request.
    lora_names: of each row, empty without one; the task id that goes with it is in `lora_task_ids`.
    priorities: of each row, smaller ones first.
    """

    prompts: list[list[int]]
    num_sequences: int
    sampling: list[SamplingParams]
    lora_task_ids: list[int | None]
    lora_names: list[str]
    priorities: list[int]
    adapter: tuple[int, PackedAdapter] | None
    is_streaming: bool
    excludes_input: bool
    pad_id: int
    returns_perf: bool
    returns_kv_cache: bool
    vocab_size: int

    @property
    def is_search(self) -> bool:
        """Whether beam search answers."""
        return self.sampling[0].beam_width > 1

    @property
    def requests_per_row(self) -> int:
        """How many requests a row is to the engine."""
        return 1 if self.is_search else self.num_sequences


@dataclass(frozen=True)
class UploadCall:
    """Store an adapter and generate nothing."""

    lora_task_id: int
    adapter: PackedAdapter
    lora_name: str


def is_stop(inputs: InputTensors) -> bool:
    """Whether a request only wants the requests of its own id to end; its other tensors are dummies."""
    return inputs.common("stop", default=False)


def has_weights(inputs: InputTensors) -> bool:
    """Whether an adapter comes with a request."""
    return bool(inputs.present(*_WEIGHTS))


def read_call(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer) -> GenerateCall | UploadCall:
    """Raises InvalidRequest or Unsupported. Nothing of the request's memory is kept."""
    refuse_unsupported(inputs)
    _check_adapter_tensors(inputs)
    if has_weights(inputs) and not inputs.present(*_PROMPTS, *_MAX_TOKENS):
        return UploadCall(*_read_adapter(inputs, info), lora_name=inputs.text("lora_name", 0) or "")
    return _read_generate(inputs, info, tokenizer)


def _read_generate(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer) -> GenerateCall:
    rows = range(inputs.num_rows(_prompt_name(inputs)))
    sampling = [_read_sampling(inputs, row, info, tokenizer) for row in rows]
    is_streaming = inputs.common("streaming", default=False)
    return GenerateCall(
        sampling=sampling,
        num_sequences=_read_num_sequences(inputs, _beam_width(sampling, is_streaming)),
        prompts=[
            _truncated(_read_prompt(inputs, row, info, tokenizer), inputs, row, sampling[row].max_tokens, info)
            for row in rows
        ],
        lora_task_ids=[_read_task_id(inputs, row) for row in rows],
        lora_names=[inputs.text("lora_name", row) or "" for row in rows],
        priorities=[inputs.scalar("priority", row) or 0 for row in rows],
        is_streaming=is_streaming,
        excludes_input=inputs.common("exclude_input_in_output", default=info.exclude_input_in_output),
        pad_id=_read_pad_id(inputs, info),
        vocab_size=info.vocab_size,
        returns_perf=inputs.common("return_perf_metrics", default=False),
        returns_kv_cache=inputs.common("return_kv_cache_reuse_stats", default=False),
        adapter=_read_adapter(inputs, info) if has_weights(inputs) else None,
    )


def _prompt_name(inputs: InputTensors) -> str:
    present = inputs.present(*_PROMPTS)
    if len(present) != 1:
        found = " and ".join(present) or "none of them"
        raise InvalidRequest(f"a request needs exactly one of {', '.join(_PROMPTS)}; it has {found}")
    return present[0]


def _read_prompt(inputs: InputTensors, row: int, info: EngineInfo, tokenizer: Tokenizer) -> list[int]:
    if (text := inputs.text("text_input", row)) is not None:
        return encode_text(text, tokenizer, info, info.add_special_tokens)
    if (messages := inputs.text("messages", row)) is not None:
        return encode_messages(messages, tokenizer, info)
    return _read_input_ids(inputs, row)


def _read_input_ids(inputs: InputTensors, row: int) -> list[int]:
    token_ids: list[int] = inputs.vector("input_ids", row) or []
    length = inputs.scalar("input_lengths", row)
    if length is not None and not 0 <= length <= len(token_ids):
        raise InvalidRequest(f"input_lengths is {length}, expected 0 .. {len(token_ids)}, the width of input_ids")
    token_ids = token_ids[:length]
    if not token_ids:
        raise InvalidRequest("empty prompt: input_ids holds no tokens")
    return token_ids


def _truncated(prompt: list[int], inputs: InputTensors, row: int, max_tokens: int, info: EngineInfo) -> list[int]:
    """The end of a prompt that `truncate_prompt_tokens` keeps; -1: as many as leave room for `max_tokens`."""
    num_tokens = _in_range(inputs, "truncate_prompt_tokens", row, -1, math.inf)
    if num_tokens is None:
        return prompt
    if num_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens is 0, expected -1 (as many as there is room for) or a number > 0")
    if num_tokens == -1 and (num_tokens := info.max_model_len - max_tokens) < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens is -1, and max_tokens {max_tokens} leaves no room for a prompt: max_model_len is "
            f"{info.max_model_len}"
        )
    return prompt[-num_tokens:]


def _read_sampling(inputs: InputTensors, row: int, info: EngineInfo, tokenizer: Tokenizer) -> SamplingParams:
    max_tokens = _read_max_tokens(inputs, row)
    temperature = _in_range(inputs, "temperature", row, 0.0, math.inf)
    top_p = _in_range(inputs, "runtime_top_p", row, -math.inf, 1.0)
    top_p = top_p if top_p is not None and top_p > 0 else None
    num_top_log_probs = _in_range(inputs, "num_top_log_probs", row, 0, math.inf) or 0
    num_prompt_top_log_probs = _in_range(inputs, "num_prompt_top_log_probs", row, 0, math.inf) or 0
    min_p = _in_range(inputs, "min_p", row, 0.0, 1.0) or 0.0
    top_k = _in_range(inputs, "runtime_top_k", row, 0, math.inf)
    if top_k is None:
        # Upstream's text clients always send a temperature of 1, which alone changes nothing there.
        top_k = 1 if temperature in (None, 1.0) and top_p is None and not min_p else 0
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_in_range(inputs, "min_tokens", row, 0, max_tokens) or 0,
        temperature=1.0 if temperature is None else temperature,
        top_k=top_k,
        top_p=1.0 if top_p is None else top_p,
        top_p_decay=_default(_positive(inputs, "runtime_top_p_decay", row, 1.0), 1.0),
        top_p_min=_default(_positive(inputs, "runtime_top_p_min", row, 1.0), 1e-6),
        top_p_reset_id=_default(_in_range(inputs, "runtime_top_p_reset_ids", row, -1, math.inf), -1),
        min_p=min_p,
        repetition_penalty=_default(_positive(inputs, "repetition_penalty", row, math.inf), 1.0),
        presence_penalty=_in_range(inputs, "presence_penalty", row, -math.inf, math.inf) or 0.0,
        frequency_penalty=_in_range(inputs, "frequency_penalty", row, -math.inf, math.inf) or 0.0,
        embedding_bias=read_bias(inputs, row, info, tokenizer),
        bad_token_sequences=read_bad_sequences(inputs, row, tokenizer, info.limits),
        seed=inputs.scalar("seed", row),
        end_id=_read_end_id(inputs, row, info),
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
        beam_width=_in_range(inputs, "beam_width", row, 1, math.inf) or 1,
        length_penalty=_in_range(inputs, "len_penalty", row, -math.inf, math.inf) or 0.0,
        early_stopping=int(_default(inputs.scalar("early_stopping", row), True)),
        beam_search_diversity_rate=_in_range(inputs, "beam_search_diversity_rate", row, -math.inf, math.inf) or 0.0,
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


def _beam_width(sampling: list[SamplingParams], is_streaming: bool) -> int:
    widths = {row.beam_width for row in sampling}
    if len(widths) > 1:
        raise InvalidRequest("beam_width must be the same in every row of a request")
    if is_streaming and widths != {1}:
        raise Unsupported(f"beam_width {widths.pop()} together with streaming: what beams say changes until the end")
    return widths.pop()


def _read_num_sequences(inputs: InputTensors, beam_width: int) -> int:
    """Of a beam search at most, and unless told otherwise, all beams."""
    name = "num_return_sequences"
    rows = range(inputs.num_rows(name)) if name in inputs else range(0)
    most = beam_width if beam_width > 1 else _MAX_SEQUENCES
    counts = {_in_range(inputs, name, row, 1, most) for row in rows} or {beam_width}
    if len(counts) > 1:
        raise InvalidRequest(f"{name} must be the same in every row of a request")
    return int(counts.pop())


def _read_max_tokens(inputs: InputTensors, row: int) -> int:
    values = {name: _in_range(inputs, name, row, 0, math.inf) for name in inputs.present(*_MAX_TOKENS)}
    if not values:
        raise InvalidRequest("max_tokens is missing; say how many tokens the answer may have")
    if len(set(values.values())) > 1:
        raise InvalidRequest(
            f"{' and '.join(f'{name} {value}' for name, value in values.items())} contradict each other"
        )
    return int(values.popitem()[1])


def _read_end_id(inputs: InputTensors, row: int, info: EngineInfo) -> int | None:
    """An id beyond the vocabulary is none: upstream's token client sends GPT-2's, 50256, unless it is told another."""
    end_id: int | None = _in_range(inputs, "end_id", row, -1, math.inf)
    return -1 if end_id is not None and end_id >= info.vocab_size else end_id


def _in_range(inputs: InputTensors, name: str, row: int, low: float, high: float) -> Any:
    value = inputs.scalar(name, row)
    # Written so that NaN fails it; infinities are no value of any of these tensors.
    if value is not None and not (low <= value <= high and math.isfinite(value)):
        raise InvalidRequest(f"{name} is {value}, expected {_range(low, high)}")
    return value


def _positive(inputs: InputTensors, name: str, row: int, high: float) -> float | None:
    value: float | None = _in_range(inputs, name, row, 0.0, high)
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


def _read_pad_id(inputs: InputTensors, info: EngineInfo) -> int:
    """What shorter rows of `output_ids` are filled up with: `pad_id`, `end_id`, the model's end token, or 0."""
    candidates = (inputs.scalar("pad_id", 0), inputs.scalar("end_id", 0), *info.end_token_ids)
    return next((token_id for token_id in candidates if token_id is not None and token_id >= 0), 0)


def _check_adapter_tensors(inputs: InputTensors) -> None:
    weights = inputs.present(*_WEIGHTS)
    if len(weights) > 1:
        raise InvalidRequest(f"an adapter has one dtype, the request has {' and '.join(weights)}")
    if bool(weights) != ("lora_config" in inputs):
        found = (weights or ["lora_config"])[0]
        raise InvalidRequest(
            f"Request for LoRA inference must have both lora_weights and lora_keys (lora_config); it has only {found}"
        )
    if weights and not inputs.present("lora_task_id", "lora_name"):
        raise InvalidRequest("lora_task_id must be set for LoRA inference: the request has lora_weights and no id")


def _read_task_id(inputs: InputTensors, row: int) -> int | None:
    """The adapter of a row, by its id, its name or both; None is the base model."""
    task_id: int | None = inputs.scalar("lora_task_id", row)
    name = inputs.text("lora_name", row)
    if name is None:
        return task_id
    if task_id not in (None, task_id_of(name)):
        raise InvalidRequest(
            f"lora_name {name!r} is LoRA task {task_id_of(name)} and lora_task_id is {task_id}; send one of them"
        )
    return task_id_of(name)


def _read_adapter(inputs: InputTensors, info: EngineInfo) -> tuple[int, PackedAdapter]:
    weights = inputs.matrix(inputs.present(*_WEIGHTS)[0])
    if weights.nbytes > info.max_adapter_bytes:
        raise InvalidRequest(
            f"lora_weights has {weights.nbytes} bytes and lora_max_adapter_bytes is {info.max_adapter_bytes}"
        )
    task_id = _read_task_id(inputs, 0)
    assert task_id is not None, "checked before"
    return task_id, pack_adapter(weights, inputs.matrix("lora_config"), info.adapter_layout)
