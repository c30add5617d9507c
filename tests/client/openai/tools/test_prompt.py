"""Tools in the system message, and a conversation without what only templates for tools write."""

from __future__ import annotations

import json
from typing import Any

from multilora_client.openai.tools.calls import join_calls
from multilora_client.openai.tools.formats import TOOL_FORMATS
from multilora_client.openai.tools.parser import ToolParser
from multilora_client.openai.tools.prompt import tell_tools

SKY = {"type": "function", "function": {"name": "sky", "parameters": {"type": "object"}}}
CALL = {"type": "function", "id": "1", "function": {"name": "sky", "arguments": {"city": "Köln"}}}


def test_the_tools_are_after_the_system_message_or_are_one() -> None:
    question = {"role": "user", "content": "Rain?"}
    alone = tell_tools([question], [SKY])
    system = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    after = tell_tools([system, question], [SKY])

    assert alone is not None
    assert after is not None
    assert [message["role"] for message in alone] == [message["role"] for message in after] == ["system", "user"]
    assert json.dumps(SKY) in alone[0]["content"]
    assert after[0]["content"] == f"Be brief.\n\n{alone[0]['content']}"
    assert alone[1] == question


def test_calls_are_written_as_they_are_read() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "ry"}]},
    ]
    _, _, answer, result = tell_tools(messages, [SKY]) or []
    assert tell_tools(messages, []) == [messages[0], answer, result]
    assert tell_tools(messages[:1], []) is None

    assert set(answer) == set(result) == {"role", "content"}
    parser = ToolParser(TOOL_FORMATS["hermes"], ["sky"])
    calls = join_calls([*parser.feed(answer["content"]), *parser.finish()])
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("sky", {"city": "Köln"})] * 2
    assert answer["content"].startswith("I look.\n")
    assert result == {"role": "user", "content": "<tool_response>\ndry\n</tool_response>"}
