"""`Answer`: the engine's answer to a request as Dynamo's front reads it; `dynamo_error`: the same for an error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from dynamo.llm.exceptions import (
    Cancelled,
    DynamoException,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Unknown,
    WorkerUnavailable,
)

from multilora_engine.dynamo.fleet_uploads import UploadLost
from multilora_engine.errors import EngineUnavailable, RateExceeded, RequestError, Unsupported
from multilora_engine.request import GenerationRequest, TokenLogProb, TokenOutput
from multilora_engine.sequences.prompt_log_probs import NO_TOKEN, row_type
from multilora_engine.text.tokenizer import Tokenizer
from multilora_wire.adapter_use import parse_use

_TOO_MANY_REQUESTS = 429

_BY_CODE: dict[str, type[DynamoException]] = {
    "INVALID_ARG": InvalidArgument,
    "NOT_FOUND": InvalidArgument,
    "ALREADY_EXISTS": InvalidArgument,
    "UNSUPPORTED": InvalidArgument,
    "PERMISSION_DENIED": InvalidArgument,
    "UNAUTHENTICATED": InvalidArgument,
    "UNAVAILABLE": WorkerUnavailable,
    "CANCELLED": Cancelled,
}


def dynamo_error(error: RequestError) -> DynamoException | HttpError:
    """The exception for an error. After EngineUnavailable another worker may go on where this one stopped."""
    if isinstance(error, UploadLost) and error.may_be_elsewhere:
        # Dynamo's front sends no weights: it tries another worker, which may reach the one that has them.
        error = EngineUnavailable(str(error))
    text = f"[{error.code}] {error}"
    if isinstance(error, EngineUnavailable):
        return EngineShutdown(text)
    if error.code == RateExceeded.code:
        return HttpError(_TOO_MANY_REQUESTS, text)
    return _BY_CODE.get(error.code, Unknown)(text)


Chunk = dict[str, Any]
"""Dynamo's `GenerateChunk`."""

CANCELLED: Chunk = {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
"""The last chunk of a cancelled answer."""

END: Chunk = {"token_ids": [], "index": 0, "finish_reason": "stop"}
"""The last chunk of an answer that consists of messages and not of tokens."""

_NO_LOG_PROB = -9999.0
"""Stands for minus infinity, which JSON cannot express: the log-prob of a token that the guide has ruled out."""


class Answer:
    """Turns each output into a chunk; the last chunk has `finish_reason` and the numbers of tokens."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer

    def chunk(self, output: TokenOutput) -> Chunk:
        """The chunk of an output. output: has no error. Raises Unsupported if the engine asks for another prompt."""
        if output.asked_use is not None:
            use = ", ".join(parse_use(output.asked_use).describe())
            raise Unsupported(
                f"LoRA adapter {self._request.lora_name!r} has a use of its own ({use}), and Dynamo's front writes "
                "chats by the base model's; ask through Triton"
            )
        chunk: Chunk = {"token_ids": output.token_ids, "index": 0}
        if output.log_probs:
            chunk["log_probs"] = [_finite(told.log_prob) for told in output.log_probs]
        if self._request.sampling.num_top_log_probs and output.log_probs:
            pairs = zip(output.token_ids, output.log_probs, strict=True)
            chunk["top_logprobs"] = [self._top(token_id, told) for token_id, told in pairs]
        if output.prompt_log_probs:
            chunk["engine_data"] = {"prompt_logprobs": self._prompt_log_probs(output.prompt_log_probs)}
        if output.finish_reason is not None:
            chunk["finish_reason"] = output.finish_reason
            chunk["completion_usage"] = _usage(output)
        return chunk

    def _top(self, token_id: int, told: TokenLogProb) -> Sequence[Mapping[str, Any]]:
        """The likeliest tokens, best first, then the chosen token if it is not among them."""
        entries = list(told.top)
        if token_id not in dict(entries):
            entries.append((token_id, told.log_prob))
        return [
            {
                "rank": rank,
                "token_id": entry_id,
                "token": self._text(entry_id),
                "logprob": _finite(log_prob),
                "bytes": list(self._tokenizer.spell(entry_id)),
            }
            for rank, (entry_id, log_prob) in enumerate(entries, start=1)
        ]

    def _prompt_log_probs(self, told: bytes) -> Sequence[Mapping[str, Any] | None]:
        """For each token of the prompt its log-prob and the likeliest tokens', by token id; None for the first."""
        rows = np.frombuffer(told, row_type(self._request.sampling.num_prompt_top_log_probs))
        tokens = zip(self._request.prompt_token_ids[1:], rows[1:], strict=True)
        return [None, *(self._prompt_entry(token_id, row) for token_id, row in tokens)]

    def _prompt_entry(self, token_id: int, row: Any) -> Mapping[str, Any]:
        top = list(zip(row["top_ids"].tolist(), row["top_log_probs"].tolist(), strict=True))
        entries = {
            str(top_id): {"logprob": _finite(log_prob), "rank": rank, "decoded_token": self._text(top_id)}
            for rank, (top_id, log_prob) in enumerate(top, start=1)
            if top_id != NO_TOKEN
        }
        chosen = {"logprob": _finite(float(row["log_prob"])), "decoded_token": self._text(token_id)}
        entries.setdefault(str(token_id), chosen)
        return entries

    def _text(self, token_id: int) -> str:
        return self._tokenizer.spell(token_id).decode(errors="replace")


def _usage(output: TokenOutput) -> Mapping[str, Any]:
    return {
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": output.num_output_tokens,
        "total_tokens": output.num_prompt_tokens + output.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _finite(log_prob: float) -> float:
    return log_prob if math.isfinite(log_prob) else _NO_LOG_PROB
