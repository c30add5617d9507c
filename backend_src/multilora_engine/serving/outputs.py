"""The output tensors of `generation` and `generation_unary`, by name; of a prompt's tokens, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from multilora_engine.lora.names import task_id_of
from multilora_engine.request import PerfMetrics, TokenOutput
from multilora_engine.sequences.prompt_log_probs import NO_TOKEN, row_type


class PromptTokens(msgspec.Struct, frozen=True):
    """The prompt of a request that wants to know how likely its tokens were.

    num_top: of how many of the likeliest tokens. spell: the bytes of a token, of a special one its name.
    """

    token_ids: list[int]
    num_top: int
    spell: Callable[[int], bytes]

    def answer(self, log_probs: bytes) -> PromptAnswer:
        """log_probs: of an engine's output."""
        return PromptAnswer(self, np.frombuffer(log_probs, row_type(self.num_top)))


class PromptAnswer(msgspec.Struct, frozen=True):
    """The values of the outputs of that name, without their dimension of rows; None where there are none."""

    prompt: PromptTokens
    rows: NDArray[Any]

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        return np.array(self.prompt.token_ids, np.int32)

    @property
    def prompt_log_probs(self) -> NDArray[np.float32]:
        return self._column("log_prob")

    @property
    def prompt_top_log_prob_ids(self) -> NDArray[np.int32] | None:
        return self._column("top_ids") if self.prompt.num_top else None

    @property
    def prompt_top_log_probs(self) -> NDArray[np.float32] | None:
        return self._column("top_log_probs") if self.prompt.num_top else None

    @property
    def prompt_tokens(self) -> NDArray[np.object_]:
        """[tokens, 1 + num_top], each token and then the likeliest ones in its place."""
        token_ids = np.column_stack([self.prompt_ids, self._column("top_ids")])
        texts = [
            [b"" if i == NO_TOKEN else characters_of(self.prompt.spell(i)) for i in row] for row in token_ids.tolist()
        ]
        return np.array(texts, np.object_)

    def _column(self, field: str) -> NDArray[Any]:
        """A copy that lies close together, as a tensor must."""
        column: NDArray[Any] = np.ascontiguousarray(self.rows[field])
        return column


def characters_of(token: bytes) -> bytes:
    """Text in UTF-8 whose characters are the bytes of a token, so that JSON can carry a part of a character."""
    return token.decode("latin-1").encode()


_Column = TypeVar("_Column")


class RowAnswer(msgspec.Struct, frozen=True):
    """The part of a response about one sequence of a row. `finish_reason` is empty while there is more to come.

    num_output_tokens: of the answer's tokens, those in this response. num_output_tokens_so_far: those up to its end.
    log_probs, of the answer's tokens in this response, and perf are None when there is nothing to say of them.
    kv_cache: perf, of which only the blocks are told. top_log_probs: as log_probs, of each token the most probable
    ones, best first. generation_logits: likewise, float32 [tokens, vocab]. context_logits: the same of the prompt's
    tokens, None also where another response has them. spelled: likewise, the bytes of each token, and those of its
    most probable ones. prompt: values of the prompt's tokens, None also where another response does.
    num_cached_tokens: how many of these the prefix cache had. stop_id: the id by which a stop can name the sequence.
    stop_word: the one that ended the answer, empty without one. thinking_is_open: whether the prompt ends where the
    model's thinking begins.
    """

    batch_index: int
    sequence_index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    lora_task_id: int
    lora_digest: str
    lora_name: str = ""
    num_output_tokens_so_far: int = 0
    cum_log_prob: float = 0.0
    log_probs: list[float] | None = None
    perf: PerfMetrics | None = None
    kv_cache: PerfMetrics | None = None
    top_log_probs: list[tuple[tuple[int, float], ...]] | None = None
    context_logits: NDArray[np.float32] | None = None
    generation_logits: NDArray[np.float32] | None = None
    spelled: list[list[bytes]] | None = None
    prompt: PromptAnswer | None = None
    num_cached_tokens: int = 0
    stop_id: str = ""
    stop_word: str = ""
    thinking_is_open: bool = False


class ReplyRow(msgspec.Struct, frozen=True):
    """Which row of its request an engine request is, which of the row's sequences, the adapter it asked for, and the
    other values it wants.

    num_context_tokens: rows of the context logits. token_bytes: the spelling of tokens, for a request that wants it.
    prompt: the request's prompt, for a request that wants the log-probs of its tokens. thinking_is_open: as of
    `RowAnswer`.
    """

    batch_index: int = 0
    sequence_index: int = 0
    lora_task_id: int | None = None
    returns_log_probs: bool = False
    returns_perf: bool = False
    returns_kv_cache: bool = False
    returns_top_log_probs: bool = False
    returns_generation_logits: bool = False
    vocab_size: int = 0
    num_context_tokens: int = 0
    token_bytes: Callable[[int], bytes] | None = None
    prompt: PromptTokens | None = None
    thinking_is_open: bool = False

    def answer(
        self,
        output: TokenOutput,
        num_output_tokens_before: int = 0,
        context_logits: NDArray[np.float32] | None = None,
    ) -> RowAnswer:
        """The response that has all of `output`, after responses with so many of the answer's tokens.

        context_logits: of the whole prompt, in the first response only.
        """
        return RowAnswer(
            batch_index=self.batch_index,
            sequence_index=self.sequence_index,
            token_ids=output.token_ids,
            text=output.text,
            finish_reason=output.finish_reason or "",
            num_input_tokens=output.num_prompt_tokens,
            num_output_tokens=output.num_output_tokens - num_output_tokens_before,
            lora_task_id=task_id_of(output.lora_name) if output.lora_name else self.lora_task_id or 0,
            lora_digest=output.lora_digest,
            lora_name=output.lora_name,
            num_output_tokens_so_far=output.num_output_tokens,
            cum_log_prob=output.cum_log_prob,
            log_probs=[token.log_prob for token in output.log_probs] if self.returns_log_probs else None,
            perf=output.perf if self.returns_perf else None,
            kv_cache=output.perf if self.returns_kv_cache else None,
            top_log_probs=[token.top for token in output.log_probs] if self.returns_top_log_probs else None,
            context_logits=context_logits,
            generation_logits=self._read_logits(output.generation_logits) if self.returns_generation_logits else None,
            spelled=self._spell(output, self.token_bytes) if self.token_bytes else None,
            prompt=self.prompt.answer(output.prompt_log_probs) if self.prompt and output.prompt_log_probs else None,
            num_cached_tokens=output.num_cached_tokens,
            stop_id=output.request_id,
            stop_word=output.stop_word,
            thinking_is_open=self.thinking_is_open,
        )

    @staticmethod
    def _spell(output: TokenOutput, token_bytes: Callable[[int], bytes]) -> list[list[bytes]]:
        """The bytes of each of the answer's tokens, which are at the end of all, and of its likeliest alternatives."""
        answer_ids = output.token_ids[len(output.token_ids) - len(output.log_probs) :]
        return [
            [token_bytes(i) for i in (token_id, *(i for i, _ in token.top))]
            for token_id, token in zip(answer_ids, output.log_probs, strict=True)
        ]

    def _read_logits(self, values: bytes) -> NDArray[np.float32]:
        return np.frombuffer(values, np.float32).reshape(-1, max(self.vocab_size, 1))


class OutputColumns:
    """The outputs that a request asks for, picked once for all of its responses.

    The leading dimension of each array is the rows. `num_sequences` is the number of answers for each row in a
    response, in place of upstream's beams.

    - output_ids: [rows, num_sequences, longest], padded with `pad_id`. output_log_probs: the same, padded with 0.
    - top_log_probs, top_log_prob_ids, output_tokens: the same, with one more dimension for the values of each token.
    - generation_logits: [rows, num_sequences, longest, vocab]. context_logits: [rows, longest prompt, vocab].
    - Values of the prompt's tokens: [rows, longest prompt], some with one more dimension.
    - Arrays that are equal for all sequences of a row (`_SAME_IN_A_ROW`), or that count them together: [rows, 1].
    - All others: [rows, num_sequences].

    flat_text_output is [rows * num_sequences], and left out beside text_output. has_flat_text: so is text_output.
    """

    def __init__(self, names: Collection[str], has_flat_text: bool = False) -> None:
        self._flat = {"flat_text_output", "text_output"} if has_flat_text else {"flat_text_output"}
        self._plain = _picked(_COLUMNS, {*names} - {"flat_text_output"} if "text_output" in names else names)
        self._log_probs = _picked(_LOG_PROB_COLUMNS, names)
        self._perf = _picked(_PERF_COLUMNS, names)
        self._kv_cache = _picked(_KV_CACHE_COLUMNS, names)
        self._optional = _picked(_OPTIONAL_COLUMNS, names)
        self._has_token_ids = "output_ids" in names
        self._has_thinking = "thinking_is_open" in names

    @property
    def has_text(self) -> bool:
        """Whether a response has the answers' texts, in either shape."""
        return not {"text_output", "flat_text_output"}.isdisjoint(self._plain)

    def plain_values(self, answers: Sequence[RowAnswer]) -> dict[str, list[int | bytes]]:
        """The answers' values of the outputs that have one value an answer, most of which a stream repeats."""
        return {name: [value(answer) for answer in answers] for name, (value, _) in self._plain.items()}

    def plain_array(self, name: str, values: Sequence[int | bytes], num_sequences: int = 1) -> NDArray[Any]:
        """The array of `plain_values`."""
        array: NDArray[Any] = np.array(values, self._plain[name][1])
        if name in self._flat:
            return array
        array = array.reshape(-1, num_sequences)
        if name in _SUMMED_IN_A_ROW:
            array = array.sum(axis=1, dtype=array.dtype, keepdims=True)
        return array[:, :1] if name in _SAME_IN_A_ROW else array

    def other_arrays(
        self, answers: Sequence[RowAnswer], pad_id: int, num_sequences: int = 1
    ) -> dict[str, NDArray[Any]]:
        """All other values, output_ids first. Log-probs, logits and performance metrics are left out where answers have
        none, and `thinking_is_open` where no prompt opens the thinking.

        So are token ids of an upload: it has no prompt. The server (24.10) never frees 80 bytes of a tensor without
        elements that it sends by HTTP.
        """
        arrays: dict[str, NDArray[Any]] = {}
        if self._has_token_ids and any(answer.num_input_tokens for answer in answers):
            arrays["output_ids"] = _padded([answer.token_ids for answer in answers], pad_id, np.int32)
        if self._log_probs and all(answer.log_probs is not None for answer in answers):
            arrays |= {name: build(answers) for name, build in self._log_probs.items()}
        if self._perf and all(answer.perf is not None for answer in answers):
            arrays |= {name: build(answers) for name, build in self._perf.items()}
        if self._kv_cache and all(answer.perf or answer.kv_cache for answer in answers):
            arrays |= {name: build(answers) for name, build in self._kv_cache.items()}
        if self._has_thinking and any(answer.thinking_is_open for answer in answers):
            arrays["thinking_is_open"] = _numbers(lambda row: row.thinking_is_open, np.bool_)(answers)
        for name, column in self._optional.items():
            values = [value for answer in answers if (value := column(answer)) is not None]
            if len(values) == len(answers):
                arrays[name] = _stacked(values)
        return {name: _by_row(name, array, num_sequences) for name, array in arrays.items()}


def _picked(columns: Mapping[str, _Column], names: Collection[str]) -> dict[str, _Column]:
    return {name: column for name, column in columns.items() if name in names}


def _by_row(name: str, array: NDArray[Any], num_sequences: int) -> NDArray[Any]:
    """array: [answers, 1, ...]"""
    if name in _SAME_IN_A_ROW:
        return array[::num_sequences]
    return array.reshape(len(array) // num_sequences, num_sequences, *array.shape[2:])


def _numbers(
    value: Callable[[RowAnswer], float], dtype: type = np.int32
) -> Callable[[Sequence[RowAnswer]], NDArray[Any]]:
    return lambda rows: np.array([[value(row)] for row in rows], dtype)


def _perf_numbers(
    value: Callable[[PerfMetrics], int], dtype: type = np.int32
) -> Callable[[Sequence[RowAnswer]], NDArray[Any]]:
    def read(row: RowAnswer) -> int:
        metrics = row.perf or row.kv_cache
        assert metrics is not None, "times and blocks are only told where every answer has them"
        return value(metrics)

    return _numbers(read, dtype)


_COLUMNS: Mapping[str, tuple[Callable[[RowAnswer], int | bytes], type]] = {
    "sequence_length": (lambda row: len(row.token_ids), np.int32),
    "text_output": (lambda row: row.text.encode(), np.object_),
    "flat_text_output": (lambda row: row.text.encode(), np.object_),
    "finish_reason": (lambda row: row.finish_reason.encode(), np.object_),
    "num_input_tokens": (lambda row: row.num_input_tokens, np.int32),
    "num_output_tokens": (lambda row: row.num_output_tokens, np.int32),
    "num_cached_tokens": (lambda row: row.num_cached_tokens, np.int32),
    "num_output_tokens_so_far": (lambda row: row.num_output_tokens_so_far, np.int32),
    "stop_id": (lambda row: row.stop_id.encode(), np.object_),
    "sequence_index": (lambda row: row.sequence_index, np.int32),
    "batch_index": (lambda row: row.batch_index, np.int32),
    "lora_task_id_out": (lambda row: row.lora_task_id, np.uint64),
    "lora_digest": (lambda row: row.lora_digest.encode(), np.object_),
    "lora_name_out": (lambda row: row.lora_name.encode(), np.object_),
}
"""The outputs of one value an answer, and the type of their arrays."""

_PROMPT_COLUMNS = (
    "prompt_ids",
    "prompt_log_probs",
    "prompt_top_log_prob_ids",
    "prompt_top_log_probs",
    "prompt_tokens",
)

# The index is that of the response's first sequence of a row: 0 where it has them all.
_SAME_IN_A_ROW = frozenset(
    {
        "num_input_tokens",
        "num_cached_tokens",
        "sequence_index",
        "batch_index",
        "lora_task_id_out",
        "lora_digest",
        "lora_name_out",
        "thinking_is_open",
        "context_logits",
        *_PROMPT_COLUMNS,
    }
)

_SUMMED_IN_A_ROW = frozenset({"num_output_tokens"})

_LOG_PROB_COLUMNS: Mapping[str, Callable[[Sequence[RowAnswer]], NDArray[Any]]] = {
    "cum_log_probs": _numbers(lambda row: row.cum_log_prob, np.float32),
    "output_log_probs": lambda rows: _padded([row.log_probs or [] for row in rows], 0.0, np.float32),
}


def _prompt_column(name: str, row: RowAnswer) -> NDArray[Any] | None:
    column: NDArray[Any] | None = getattr(row.prompt, name, None)
    return column


_OPTIONAL_COLUMNS: Mapping[str, Callable[[RowAnswer], NDArray[Any] | None]] = {
    "top_log_prob_ids": lambda row: _top_column(row, 0, np.int32),
    "top_log_probs": lambda row: _top_column(row, 1, np.float32),
    "output_tokens": lambda row: _spelled_column(row),
    "context_logits": lambda row: row.context_logits,
    "generation_logits": lambda row: None if row.generation_logits is None else row.generation_logits[np.newaxis],
    **{name: partial(_prompt_column, name) for name in _PROMPT_COLUMNS},
}
"""The function that gives an output's value for one answer, None if it has none."""

_PERF_COLUMNS: Mapping[str, Callable[[Sequence[RowAnswer]], NDArray[Any]]] = {
    "arrival_time_ns": _perf_numbers(lambda perf: perf.arrival_time_ns, np.int64),
    "first_scheduled_time_ns": _perf_numbers(lambda perf: perf.first_scheduled_time_ns, np.int64),
    "first_token_time_ns": _perf_numbers(lambda perf: perf.first_token_time_ns, np.int64),
    "last_token_time_ns": _perf_numbers(lambda perf: perf.last_token_time_ns, np.int64),
    # There is no speculative decoding.
    "acceptance_rate": _perf_numbers(lambda perf: 0, np.float32),
    "total_accepted_draft_tokens": _perf_numbers(lambda perf: 0),
    "total_draft_tokens": _perf_numbers(lambda perf: 0),
}

_KV_CACHE_COLUMNS: Mapping[str, Callable[[Sequence[RowAnswer]], NDArray[Any]]] = {
    "kv_cache_alloc_total_blocks": _perf_numbers(lambda perf: perf.kv_cache_alloc_total_blocks),
    "kv_cache_alloc_new_blocks": _perf_numbers(lambda perf: perf.kv_cache_alloc_new_blocks),
    "kv_cache_reused_blocks": _perf_numbers(lambda perf: perf.kv_cache_reused_blocks),
}


def _top_column(row: RowAnswer, field: int, dtype: type) -> NDArray[Any] | None:
    """The ids (field 0) or values (1) of the most probable tokens, [1, tokens, how many]."""
    if row.top_log_probs is None:
        return None
    count = len(row.top_log_probs[0]) if row.top_log_probs else 0
    values = [[entry[field] for entry in top] for top in row.top_log_probs]
    return np.array(values, dtype).reshape(1, len(values), count)


def _spelled_column(row: RowAnswer) -> NDArray[Any] | None:
    """[1, tokens, 1 + how many]: text whose characters are the bytes, so that JSON can carry it."""
    if row.spelled is None:
        return None
    count = len(row.spelled[0]) if row.spelled else 0
    texts = [list(map(characters_of, tokens)) for tokens in row.spelled]
    return np.array(texts, np.object_).reshape(1, len(texts), count)


def _stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Behind a new first dimension, filled up with 0, or empty texts, to the largest size in every other one."""
    if len(arrays) == 1:
        return arrays[0][np.newaxis]  # perhaps of hundreds of megabytes, which are not copied
    dtype, shape = arrays[0].dtype, np.max([array.shape for array in arrays], axis=0)
    stacked: NDArray[Any] = np.full((len(arrays), *shape), b"" if dtype.hasobject else 0, dtype)
    for target, array in zip(stacked, arrays, strict=True):
        target[tuple(map(slice, array.shape))] = array
    return stacked


def _padded(rows: Sequence[Sequence[float]], pad: float, dtype: type) -> NDArray[Any]:
    array: NDArray[Any] = np.full((len(rows), 1, max(map(len, rows))), pad, dtype)
    for target, values in zip(array, rows, strict=True):
        target[0, : len(values)] = values
    return array
