"""Text to token ids and back, by the server's own tokenizer: its models `preprocessing` and `postprocessing`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Unpack

import numpy as np

from multilora_client.generation_inputs import checked_tensor, text_or_chat_input
from multilora_client.messages import InferRequest, Response
from multilora_client.options import ChatOptions, check_names


def tokenize_request(
    prompt: str | None, add_special_tokens: bool | None, **options: Unpack[ChatOptions]
) -> InferRequest:
    """The request for token ids. Raises InvalidRequest unless there is exactly one of a prompt and `messages`."""
    check_names(options, ChatOptions)
    inputs = text_or_chat_input("QUERY", "MESSAGES", prompt, options)
    if add_special_tokens is not None:
        inputs["ADD_SPECIAL_TOKENS"] = checked_tensor("add_special_tokens", add_special_tokens, np.bool_)
    return InferRequest("preprocessing", uuid.uuid4().hex, inputs)


def parse_token_ids(response: Response) -> list[int]:
    return list(response.outputs["INPUT_ID"])


def detokenize_request(token_ids: Sequence[int]) -> InferRequest:
    """The request for a text. Raises InvalidRequest for an id that is no int32."""
    inputs = {
        "TOKENS_BATCH": checked_tensor("token_ids", list(token_ids), np.int32, shape=(1, 1, -1)),
        "SEQUENCE_LENGTH": checked_tensor("token_ids", len(token_ids), np.int32),
    }
    return InferRequest("postprocessing", uuid.uuid4().hex, inputs)


def parse_text(response: Response) -> str:
    return str(response.first("OUTPUT"))
