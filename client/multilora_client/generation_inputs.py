"""The input tensors of a generation, from its options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from multilora_client.doors import Door
from multilora_client.errors import InvalidRequest
from multilora_client.options import DEFAULT_MAX_TOKENS, ChatOptions, GenerateOptions, check_names
from multilora_client.tensors import Tensor, numeric_tensor, string_tensor
from multilora_wire.adapter_names import task_id_of_name


def generation_inputs(
    prompt: str | None, streaming: bool, door: Door, **options: Unpack[GenerateOptions]
) -> dict[str, Tensor]:
    """The input tensors of a generation.

    Raises InvalidRequest unless there is exactly one prompt, and for a stream of beams.
    """
    check_names(options, GenerateOptions)
    if streaming and (beam_width := options.get("beam_width") or 1) > 1:
        raise InvalidRequest(f"beam_width is {beam_width}: a stream has one beam; ask without streaming for several")
    inputs = _prompt_inputs(prompt, options) | _sampling_inputs(options)
    inputs["streaming"] = numeric_tensor(streaming, np.bool_)
    for flag in ("exclude_input_in_output", "return_num_input_tokens", "return_num_output_tokens"):
        inputs[flag] = numeric_tensor(True, np.bool_)
    return {door.input_names.get(name, name): tensor for name, tensor in inputs.items()}


def task_id_input(lora_task_id: int) -> dict[str, Tensor]:
    """The input that selects an adapter. Raises InvalidRequest unless it is an unsigned 64-bit number."""
    return {"lora_task_id": checked_tensor("lora_task_id", lora_task_id, np.uint64)}


def name_input(lora_name: str) -> dict[str, Tensor]:
    """The input that names an adapter. Raises InvalidRequest unless it is Unicode text."""
    return {"lora_name": _strings("lora_name", [lora_name])}


def digest_input(digest: str) -> dict[str, Tensor]:
    """The input that tells the version of an adapter. Raises InvalidRequest unless it is Unicode text."""
    return {"lora_expected_digest": _strings("expected digest", [digest])}


def stop_inputs() -> dict[str, Tensor]:
    """The inputs of a request that ends the request with the same id."""
    return {"stop": numeric_tensor(True, np.bool_)}


def _prompt_inputs(prompt: str | None, options: GenerateOptions) -> dict[str, Tensor]:
    messages, input_ids = options.get("messages"), options.get("input_ids")
    if sum(given is not None for given in (prompt, messages, input_ids)) != 1:
        raise InvalidRequest("exactly one of prompt, messages and input_ids is required")
    if prompt is not None or messages is not None:
        return text_or_chat_input("text_input", "messages", prompt, options)
    _check_chat_options(options)
    return {
        "input_ids": checked_tensor("input_ids", input_ids, np.int32),
        "input_lengths": numeric_tensor(len(input_ids or ()), np.int32),
    }


def text_or_chat_input(
    text_name: str, messages_name: str, prompt: str | None, options: ChatOptions
) -> dict[str, Tensor]:
    """The input of a prompt, or of a chat. Raises InvalidRequest unless there is exactly one of them."""
    messages = options.get("messages")
    if (prompt is None) == (messages is None):
        raise InvalidRequest("exactly one of prompt and messages is required")
    if messages is not None:
        return {messages_name: _strings("messages", [_chat_json(messages, options)])}
    _check_chat_options(options)
    return {text_name: _strings("prompt", [prompt or ""])}


def _chat_json(messages: Sequence[Mapping[str, object]], options: ChatOptions) -> str:
    given = {name: value for name in _BESIDE_MESSAGES if (value := options.get(name)) or value is False}
    chat = {"messages": list(messages), **given} if given else list(messages)
    return json.dumps(chat, ensure_ascii=False)


_BESIDE_MESSAGES = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def _check_chat_options(options: ChatOptions) -> None:
    """Raises InvalidRequest for an option of a chat where there is none."""
    if given := [name for name in _BESIDE_MESSAGES if options.get(name)]:
        raise InvalidRequest(f"{' and '.join(given)} go with messages only")


_SAMPLING_INPUTS: Mapping[str, tuple[str, type[np.generic]]] = {
    "max_tokens": ("max_tokens", np.int32),
    "min_tokens": ("min_tokens", np.int32),
    "min_tokens_holds_stops": ("min_tokens_holds_stops", np.bool_),
    "temperature": ("temperature", np.float32),
    "top_k": ("runtime_top_k", np.int32),
    "top_p": ("runtime_top_p", np.float32),
    "min_p": ("min_p", np.float32),
    "repetition_penalty": ("repetition_penalty", np.float32),
    "presence_penalty": ("presence_penalty", np.float32),
    "frequency_penalty": ("frequency_penalty", np.float32),
    "seed": ("seed", np.uint64),
    "end_id": ("end_id", np.int32),
    "num_return_sequences": ("num_return_sequences", np.int32),
    "beam_width": ("beam_width", np.int32),
    "length_penalty": ("len_penalty", np.float32),
    "early_stopping": ("early_stopping", np.bool_),
    "beam_search_diversity_rate": ("beam_search_diversity_rate", np.float32),
    "return_log_probs": ("return_log_probs", np.bool_),
    "num_top_log_probs": ("num_top_log_probs", np.int32),
    "return_prompt_log_probs": ("return_prompt_log_probs", np.bool_),
    "num_prompt_top_log_probs": ("num_prompt_top_log_probs", np.int32),
    "add_special_tokens": ("add_special_tokens", np.bool_),
    "truncate_prompt_tokens": ("truncate_prompt_tokens", np.int32),
    "include_stop_str_in_output": ("include_stop_str_in_output", np.bool_),
    "guide_after_thinking": ("guided_decoding_after_thinking", np.bool_),
    "priority": ("priority", np.int32),
    "lora_start": ("lora_start", np.int32),
    "return_context_logits": ("return_context_logits", np.bool_),
    "return_generation_logits": ("return_generation_logits", np.bool_),
}


def _sampling_inputs(options: GenerateOptions) -> dict[str, Tensor]:
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    weak = {*(given.pop("default_options", None) or ()), *({"max_tokens"} - given.keys())}
    given.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if "temperature" in given and not given.keys() & {"top_k", "top_p"}:
        # To the server a temperature of 1 by itself asks for nothing, since others' clients always send it.
        given["top_k"] = 0
        weak.add("top_k")
    inputs = {
        input_name: checked_tensor(option, given[option], dtype)
        for option, (input_name, dtype) in _SAMPLING_INPUTS.items()
        if option in given
    }
    if "messages" in given and weak:
        inputs["default_inputs"] = _strings("default_options", sorted(_SAMPLING_INPUTS[option][0] for option in weak))
    if "decoder_text_input" in given:
        inputs["decoder_text_input"] = _strings("decoder_text_input", [given["decoder_text_input"]])
    if "decoder_input_ids" in given:
        inputs["decoder_input_ids"] = checked_tensor("decoder_input_ids", given["decoder_input_ids"], np.int32)
        inputs["decoder_input_lengths"] = numeric_tensor(len(given["decoder_input_ids"]), np.int32)
    for option in ("stop_words", "bad_words"):
        if given.get(option):
            inputs[option] = _strings(option, given[option])
    if given.get("stop_token_ids"):
        inputs["stop_words_list"] = _single_tokens("stop_token_ids", given["stop_token_ids"])
    if given.get("logit_bias"):
        inputs["embedding_bias_ids"] = checked_tensor("logit_bias", list(given["logit_bias"]), np.int32)
        inputs["embedding_bias_weights"] = checked_tensor("logit_bias", list(given["logit_bias"].values()), np.float32)
    for option in ("guide_type", "guide"):
        if option in given:
            inputs[f"guided_decoding_{option}"] = _strings(option, [given[option]])
    if "lora_name" in given:
        inputs |= name_input(given["lora_name"])
    if "lora_expected_digest" in given:
        inputs |= digest_input(given["lora_expected_digest"])
    if "lora_session" in given:
        inputs["lora_session"] = _strings("lora_session", [given["lora_session"]])
    if "lora_set" in given:
        members = {task_id_of_name(key) if isinstance(key, str) else key: w for key, w in given["lora_set"].items()}
        inputs["lora_set_task_ids"] = checked_tensor("lora_set", list(members), np.uint64)
        inputs["lora_set_weights"] = checked_tensor("lora_set", list(members.values()), np.float32)
    return inputs


def _single_tokens(option: str, token_ids: Sequence[int]) -> Tensor:
    """Sequences of one token each, as upstream writes them: all tokens, and where each sequence ends."""
    ends = range(1, len(token_ids) + 1)
    return checked_tensor(option, [list(token_ids), list(ends)], np.int32, shape=(1, 2, -1))


def checked_tensor(option: str, value: Any, dtype: type[np.generic], shape: tuple[int, ...] = (1, -1)) -> Tensor:
    """`numeric_tensor` of an option. Raises InvalidRequest, naming it."""
    try:
        return numeric_tensor(value, dtype, shape)
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidRequest(f"{option}: {error}") from error


def _strings(option: str, values: Sequence[str]) -> Tensor:
    try:
        return string_tensor(values)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{option} is not Unicode text: {error}") from error
