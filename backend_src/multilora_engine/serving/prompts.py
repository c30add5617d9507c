"""From what a client sends as a prompt to token ids: one text, or one chat as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from multilora_engine.errors import InvalidRequest
from multilora_engine.text import Tokenizer


def encode_text(text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises InvalidRequest when there are none."""
    token_ids = tokenizer.encode(text, add_special_tokens)
    if not token_ids:
        raise InvalidRequest("empty prompt: the text has no tokens")
    return token_ids


def encode_messages(text: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a chat, a JSON list of objects with `role` and `content`, ready for the answer.

    Raises InvalidRequest for anything else, and for what the model's chat template refuses.
    """
    try:
        messages = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"messages must be a JSON list of objects with role and content: {error}") from None
    return tokenizer.apply_chat_template(messages)
