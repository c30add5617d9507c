"""Attacks on OpenAI's front by requests that any client may send: rows for a table of abuse."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from trials.door_attacks import hold_connections, post
from trials.doors import Attack, Doors, told

_ATTACK_S = 5.0
_AT_ONCE = 4
_MAX_BIASES = 1024
_DEPTH = 200_000


def send_as_many_biases_as_allowed(doors: Doors) -> str:
    bias = {str(token): 0.5 for token in range(_MAX_BIASES)}
    return _again_and_again(doors, logit_bias=bias, max_tokens=16)


def send_too_many_biases(doors: Doors) -> str:
    """Send 49,152 biases, one for each token of the default model."""
    return _again_and_again(doors, logit_bias={str(token): 0.5 for token in range(49_152)}, max_tokens=16)


def ask_for_many_choices(doors: Doors) -> str:
    return _again_and_again(doors, n=128, max_tokens=4)


def send_deep_json(doors: Doors) -> str:
    """Send 400 kB of brackets."""
    body = '{"model":"base","messages":' + "[" * _DEPTH + "]" * _DEPTH + "}"
    return post(doors.openai_url, "/v1/chat/completions", body)


def hold_idle_connections(doors: Doors) -> str:
    """Hold 1,100 connections that never send a byte, for some seconds."""
    return hold_connections(doors.openai_url)


OPENAI_ATTACKS: Mapping[str, Attack] = {
    "OpenAI: logit_bias of 1,024 tokens, again and again": send_as_many_biases_as_allowed,
    "OpenAI: logit_bias of 49,152 tokens, again and again": send_too_many_biases,
    "OpenAI: 128 choices, again and again": ask_for_many_choices,
    "OpenAI: JSON 200,000 deep": send_deep_json,
    "OpenAI: 1,100 idle connections": hold_idle_connections,
}
"""The attacks by their names in a table."""


def _again_and_again(doors: Doors, **options: Any) -> str:
    """Let several clients send the same chat for as long as an attack lasts."""
    question = {"role": "user", "content": "Tell a story."}
    body = json.dumps({"model": "base", "messages": [question], **options})
    send = partial(post, doors.openai_url, "/v1/chat/completions", body, doors.headers)
    end = time.monotonic() + _ATTACK_S
    seen: list[str] = []

    def attack(_: int) -> None:
        while time.monotonic() < end:
            seen.append(send())

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(attack, range(_AT_ONCE)))
    return told(seen)
