"""Inputs that name tokens: bad words, stop words and biases, as text or as token ids.

A word is tokenized as it stands, without special tokens, as upstream's preprocessing does it: "cat" and " cat" are
different words, and a client that means both sends both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.text import Tokenizer

_MAX_WORDS_BYTES = 65_536
"""Of all words of an input together: they are taken apart while everybody else waits."""

TokenSequences = tuple[tuple[int, ...], ...]


def read_bad_sequences(inputs: InputTensors, row: int, tokenizer: Tokenizer) -> TokenSequences:
    """Those of `bad_words` and of `bad_words_list`."""
    return (*tokenize_words(inputs, "bad_words", row, tokenizer), *read_sequences(inputs, "bad_words_list", row))


def read_words(inputs: InputTensors, name: str, row: int) -> list[str]:
    """The words of a text tensor [batch, n]. Raises InvalidRequest when they are too long together."""
    words = inputs.texts(name, row)
    if (num_bytes := sum(len(word.encode()) for word in words)) > _MAX_WORDS_BYTES:
        raise InvalidRequest(f"{name} has {num_bytes} bytes of text, at most {_MAX_WORDS_BYTES} are accepted")
    return words


def tokenize_words(inputs: InputTensors, name: str, row: int, tokenizer: Tokenizer) -> TokenSequences:
    """The token ids of each word of a text tensor [batch, n]; words without tokens are left out."""
    words = (_encode(word, tokenizer) for word in read_words(inputs, name, row))
    return tuple(token_ids for token_ids in words if token_ids)


def read_sequences(inputs: InputTensors, name: str, row: int) -> TokenSequences:
    """A tensor [batch, 2, n] in upstream's form: all sequences' ids one after another, padded with anything, and
    where each of them ends, padded with -1. Raises InvalidRequest for ends that are out of order or of range.
    """
    if name not in inputs:
        return ()
    values = inputs.array(name)
    if values.ndim != 3 or values.shape[1] != 2 or row >= values.shape[0]:
        raise InvalidRequest(f"{name} has shape {list(values.shape)}, expected token ids and ends: [batch, 2, n]")
    token_ids, ends = values[row].tolist()
    ends = ends[: ends.index(-1)] if -1 in ends else ends
    starts = [0, *ends[:-1]]
    if any(not start < end <= len(token_ids) for start, end in zip(starts, ends, strict=False)):
        raise InvalidRequest(f"{name} has the ends {ends}, expected increasing numbers in 1 .. {len(token_ids)}")
    return tuple(tuple(token_ids[start:end]) for start, end in zip(starts, ends, strict=False))


def write_sequences(rows: Sequence[TokenSequences]) -> NDArray[np.int32]:
    """What `read_sequences` reads, int32 [batch, 2, longest row]: ids filled up with 0, ends with -1."""
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
        weights = read_word_biases(inputs, "embedding_bias_words", "embedding_bias_weights", row, tokenizer)
    for token_id, weight in weights.items():
        biases[token_id] = biases.get(token_id, 0.0) + weight
    for token_id, bias in biases.items():
        if not math.isfinite(bias):
            raise InvalidRequest(f"the embedding bias of token {token_id} is {bias}, expected a finite number")
    return tuple((token_id, bias) for token_id, bias in biases.items() if bias)


def read_word_biases(
    inputs: InputTensors, words_name: str, weights_name: str, row: int, tokenizer: Tokenizer
) -> dict[int, float]:
    """By token id, the weights of the words it is in. Raises InvalidRequest when there is not one weight a word."""
    words, weights = read_words(inputs, words_name, row), inputs.vector(weights_name, row) or []
    if len(words) != len(weights):
        raise InvalidRequest(f"{words_name} has {len(words)} words and {weights_name} {len(weights)} weights")
    biases: dict[int, float] = {}
    for word, weight in zip(words, weights, strict=True):
        for token_id in _encode(word, tokenizer):
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


def _encode(word: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(word, add_special_tokens=False))
