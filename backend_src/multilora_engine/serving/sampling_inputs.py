"""Reads how the tokens of an answer are chosen: the inputs of `SamplingParams`.

Defaults follow TensorRT-LLM's Triton backend and its clients: greedy unless asked otherwise, `runtime_top_p` <= 0
is unset, `runtime_top_k` 0 is no restriction, `end_id` -1 is no end token.
"""

from __future__ import annotations

import math
from typing import Any, get_args

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.request import Guide, GuideType, SamplingParams
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.token_lists import read_bad_sequences, read_bias, read_sequences, read_words
from multilora_engine.text.tokenizer import Tokenizer

MAX_TOKENS = ("max_tokens", "request_output_len")


def read_sampling(inputs: InputTensors, row: int, info: EngineInfo, tokenizer: Tokenizer) -> SamplingParams:
    max_tokens = _read_max_tokens(inputs, row)
    temperature = in_range(inputs, "temperature", row, 0.0, math.inf)
    top_p = in_range(inputs, "runtime_top_p", row, -math.inf, 1.0)
    top_p = top_p if top_p is not None and top_p > 0 else None
    num_top_log_probs = in_range(inputs, "num_top_log_probs", row, 0, math.inf) or 0
    num_prompt_top_log_probs = in_range(inputs, "num_prompt_top_log_probs", row, 0, math.inf) or 0
    min_p = in_range(inputs, "min_p", row, 0.0, 1.0) or 0.0
    top_k = in_range(inputs, "runtime_top_k", row, 0, math.inf)
    if top_k is None:
        # Upstream's text clients always send a temperature of 1, which alone changes nothing there.
        top_k = 1 if temperature in (None, 1.0) and top_p is None and not min_p else 0
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=in_range(inputs, "min_tokens", row, 0, max_tokens) or 0,
        temperature=1.0 if temperature is None else temperature,
        top_k=top_k,
        top_p=1.0 if top_p is None else top_p,
        top_p_decay=_default(_positive(inputs, "runtime_top_p_decay", row, 1.0), 1.0),
        top_p_min=_default(_positive(inputs, "runtime_top_p_min", row, 1.0), 1e-6),
        top_p_reset_id=_default(in_range(inputs, "runtime_top_p_reset_ids", row, -1, math.inf), -1),
        min_p=min_p,
        repetition_penalty=_default(_positive(inputs, "repetition_penalty", row, math.inf), 1.0),
        presence_penalty=in_range(inputs, "presence_penalty", row, -math.inf, math.inf) or 0.0,
        frequency_penalty=in_range(inputs, "frequency_penalty", row, -math.inf, math.inf) or 0.0,
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
    value: float | None = in_range(inputs, name, row, 0.0, high)
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
