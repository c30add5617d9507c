"""Inputs as token ids: prompts and chats; bad words, stop words and biases, as text or as token ids.

A word is tokenized as it stands, without special tokens, as upstream's preprocessing does it: "cat" and " cat" are
different words, and a client that means both sends both.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from multilora_engine.engine_info import CallLimits, EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.text.tokenizer import TemplateRefusal, Tokenizer
from multilora_engine.text.tokenizer_files import fast_tokenizer_class
from multilora_wire.adapter_use import NO_USE, AdapterUse


def encode_text(text: str, tokenizer: Tokenizer, info: EngineInfo, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises InvalidRequest when there are none, or the text is too long."""
    check_prompt_bytes("text_input", len(text.encode()), info)
    token_ids = tokenizer.encode(text, add_special_tokens)
    if not token_ids:
        raise InvalidRequest("empty prompt: the text has no tokens")
    return token_ids


def encode_beginning(name: str, text: str, tokenizer: Tokenizer, info: EngineInfo) -> list[int]:
    """Token ids of a text that begins an answer: those that the decoder starts with, then the text's; [] for none.

    name: of the input. The tokenizer adds no special tokens: T5's would end the answer. Raises InvalidRequest for a
    text that is too long.
    """
    assert info.source is not None, "the model has an encoder"
    check_prompt_bytes(name, len(text.encode()), info)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return [info.source.decoder_start_token_id, *token_ids] if token_ids else []


class _Chat(msgspec.Struct, forbid_unknown_fields=True):
    """A chat with the tools that the model may ask for, in the form that its template expects.

    chat_template_kwargs: other variables of the template. add_generation_prompt: whether it opens the assistant's
    turn. continue_final_message: whether the last message is left open instead, for the answer to go on with it.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


def encode_messages(
    text: str, tokenizer: Tokenizer, info: EngineInfo, add_special_tokens: bool = False, use: AdapterUse = NO_USE
) -> list[int]:
    """Token ids of a chat, ready for the answer.

    text: a JSON list of objects with `role` and `content`, or an object with such `messages` and with any of `tools`,
        `chat_template_kwargs`, `add_generation_prompt` and `continue_final_message`.
    add_special_tokens: whether the tokenizer adds its special tokens to the special tokens that the template writes.
    use: of the adapter that answers.
    Raises InvalidRequest for anything else, for texts that are too long, and from a model with an encoder;
    TemplateRefusal for a chat that the template refuses.
    """
    chat = _read_chat(text, info)
    options, keeps_special = _template_options(chat), info.special_tokens_in_messages
    most = info.limits.max_prompt_bytes
    try:
        return tokenizer.apply_chat_template(
            chat.messages, chat.tools, options, keeps_special, most, add_special_tokens, use
        )
    except RecursionError:
        raise TemplateRefusal("messages are nested too deep for the chat template") from None


def check_chat(text: str, info: EngineInfo) -> None:
    """Raises InvalidRequest for a text that is no chat, whatever its template, or that is too long."""
    _template_options(_read_chat(text, info))


def _read_chat(text: str, info: EngineInfo) -> _Chat:
    if info.source is not None:
        raise InvalidRequest("messages: the model has an encoder, and no chats; send text_input")
    check_prompt_bytes("messages", len(text.encode()), info)
    try:
        chat = msgspec.json.decode(text, type=list[dict[str, Any]] | _Chat)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            "messages must be a JSON list of objects with role and content, "
            f"or an object of such messages, tools and how the template is filled in: {error}"
        ) from None
    except RecursionError:
        raise InvalidRequest("messages are JSON that is nested too deep") from None
    return chat if isinstance(chat, _Chat) else _Chat(chat)


def _template_options(chat: _Chat) -> dict[str, Any]:
    if reserved := sorted(chat.chat_template_kwargs.keys() & _reserved()):
        raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(reserved)}")
    if chat.add_generation_prompt and chat.continue_final_message:
        raise InvalidRequest("add_generation_prompt and continue_final_message are true: the answer cannot begin twice")
    opens_turn = not chat.continue_final_message if chat.add_generation_prompt is None else chat.add_generation_prompt
    return chat.chat_template_kwargs | {
        "add_generation_prompt": opens_turn,
        "continue_final_message": chat.continue_final_message,
    }


@functools.cache
def _reserved() -> frozenset[str]:
    """Arguments of the tokenizer's own, the template itself among them; `documents` it only hands on."""
    return frozenset(inspect.signature(fast_tokenizer_class().apply_chat_template).parameters) - {"documents"}


def check_prompt_bytes(name: str, num_bytes: int, info: EngineInfo) -> None:
    """Raises InvalidRequest for a prompt of so many bytes: reading it takes time and memory by the byte."""
    if num_bytes > info.limits.max_prompt_bytes:
        raise InvalidRequest(f"{name} has {num_bytes} bytes; a prompt may have {info.limits.max_prompt_bytes}")


_ID_BYTES = 4
"""A token id arrives as int32, and counts as much among the bytes of words."""

TokenSequences = tuple[tuple[int, ...], ...]


def read_bad_sequences(inputs: InputTensors, row: int, tokenizer: Tokenizer, limits: CallLimits) -> TokenSequences:
    """The sequences of `bad_words` and of `bad_words_list`."""
    words = tokenize_words(inputs, "bad_words", row, tokenizer, limits)
    return (*words, *read_sequences(inputs, "bad_words_list", row, limits))


def read_words(inputs: InputTensors, name: str, row: int, limits: CallLimits) -> list[str]:
    """The words of a text tensor [batch, n]. Raises InvalidRequest when they are too many or too long.

    All other requests at this door wait while words are taken apart, so the tensor's size is checked before.
    """
    if name not in inputs:
        return []
    if (num_words := inputs.array(name).size) > limits.max_words_per_request:
        raise InvalidRequest(f"{name} has {num_words} words; a request may have {limits.max_words_per_request}")
    words = inputs.texts(name, row)
    _check_bytes(name, sum(len(word.encode()) for word in words), limits)
    return words


def tokenize_words(
    inputs: InputTensors, name: str, row: int, tokenizer: Tokenizer, limits: CallLimits
) -> TokenSequences:
    """The token ids of each word of a text tensor [batch, n]; words without tokens are left out."""
    words = tokenizer.encode_words(read_words(inputs, name, row, limits))
    return tuple(tuple(token_ids) for token_ids in words if token_ids)


def word_bytes(stop_words: Sequence[str], sequences: TokenSequences) -> int:
    """The bytes that words and words of ids count as."""
    return sum(len(word.encode()) for word in stop_words) + _ID_BYTES * sum(map(len, sequences))


def read_sequences(inputs: InputTensors, name: str, row: int, limits: CallLimits) -> TokenSequences:
    """A tensor [batch, 2, n] in upstream's form: all sequences' ids one after another, padded with anything, and
    where each of them ends, padded with -1. Raises InvalidRequest for ends that are out of order or of range, and for
    more ids than words may have bytes for.
    """
    if name not in inputs:
        return ()
    values = inputs.array(name)
    if values.ndim != 3 or values.shape[1] != 2 or row >= values.shape[0]:
        raise InvalidRequest(f"{name} has shape {list(values.shape)}, expected token ids and ends: [batch, 2, n]")
    _check_bytes(name, _ID_BYTES * values.shape[2], limits)
    token_ids, ends = values[row].tolist()
    ends = ends[: ends.index(-1)] if -1 in ends else ends
    starts = [0, *ends[:-1]]
    if any(not start < end <= len(token_ids) for start, end in zip(starts, ends, strict=False)):
        raise InvalidRequest(f"{name} has the ends {ends}, expected increasing numbers in 1 .. {len(token_ids)}")
    return tuple(tuple(token_ids[start:end]) for start, end in zip(starts, ends, strict=False))


def write_sequences(rows: Sequence[TokenSequences]) -> NDArray[np.int32]:
    """The tensor that `read_sequences` reads, int32 [batch, 2, longest row]: ids filled up with 0, ends with -1."""
    width = max((sum(map(len, sequences)) for sequences in rows), default=0)
    values = np.zeros((len(rows), 2, width), np.int32)
    values[:, 1] = -1
    for target, sequences in zip(values, rows, strict=True):
        token_ids = [token_id for sequence in sequences for token_id in sequence]
        target[0, : len(token_ids)] = token_ids
        target[1, : len(sequences)] = np.cumsum([len(sequence) for sequence in sequences])
    return values


def read_bias(inputs: InputTensors, row: int, info: EngineInfo, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """(token id, bias) of all tokens that have one: `embedding_bias` plus the weights of the words a token is in, or of
    its id.
    """
    biases = _read_vector(inputs, row, info, tokenizer)
    if "embedding_bias_ids" in inputs:
        weights = _read_id_biases(inputs, row)
    else:
        names = ("embedding_bias_words", "embedding_bias_weights")
        weights = read_word_biases(inputs, *names, row, tokenizer, info.limits)
    for token_id, weight in weights.items():
        biases[token_id] = biases.get(token_id, 0.0) + weight
    for token_id, bias in biases.items():
        if not math.isfinite(bias):
            raise InvalidRequest(f"the embedding bias of token {token_id} is {bias}, expected a finite number")
    return tuple((token_id, bias) for token_id, bias in biases.items() if bias)


def read_word_biases(
    inputs: InputTensors, words_name: str, weights_name: str, row: int, tokenizer: Tokenizer, limits: CallLimits
) -> dict[int, float]:
    """The weights of the words that a token is in, by token id. Raises InvalidRequest unless each word has a weight."""
    words, weights = read_words(inputs, words_name, row, limits), inputs.vector(weights_name, row) or []
    if len(words) != len(weights):
        raise InvalidRequest(f"{words_name} has {len(words)} words and {weights_name} {len(weights)} weights")
    biases: dict[int, float] = {}
    for token_ids, weight in zip(tokenizer.encode_words(words), weights, strict=True):
        for token_id in token_ids:
            biases[token_id] = biases.get(token_id, 0.0) + weight
    return biases


def _read_id_biases(inputs: InputTensors, row: int) -> dict[int, float]:
    token_ids = inputs.vector("embedding_bias_ids", row) or []
    weights = inputs.vector("embedding_bias_weights", row) or []
    if "embedding_bias_words" in inputs:
        raise InvalidRequest("embedding_bias_weights belong to embedding_bias_words or to embedding_bias_ids; send one")
    if len(token_ids) != len(weights):
        raise InvalidRequest(
            f"embedding_bias_ids has {len(token_ids)} ids and embedding_bias_weights {len(weights)} weights"
        )
    biases: dict[int, float] = {}
    for token_id, weight in zip(token_ids, weights, strict=True):
        biases[token_id] = biases.get(token_id, 0.0) + weight
    return biases


def _read_vector(inputs: InputTensors, row: int, info: EngineInfo, tokenizer: Tokenizer) -> dict[int, float]:
    vector = inputs.vector("embedding_bias", row) or []
    # Upstream's preprocessing makes one as long as the tokenizer's vocabulary, which a model may pad.
    if len(vector) not in (0, info.vocab_size, tokenizer.vocab_size):
        raise InvalidRequest(f"embedding_bias has {len(vector)} values, expected one a token: {info.vocab_size}")
    return {token_id: bias for token_id, bias in enumerate(vector) if bias}


def _check_bytes(name: str, num_bytes: int, limits: CallLimits) -> None:
    if num_bytes > (most := limits.max_word_bytes_per_request):
        raise InvalidRequest(f"{name} has {num_bytes} bytes; the words of a request may have {most}")
