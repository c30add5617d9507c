"""Tools for a chat template that has no place for them: told in the system message, in the words of Hermes.

The conversation is written as such models write it: calls as `<tool_call>` in the assistant's turns, their results as
`<tool_response>` in the user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_INTRODUCTION = """\
You can call functions. Their signatures are in <tools></tools>:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as a JSON object in <tool_call></tool_call>:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def tell_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with the tools at the end of their system message."""
    introduction = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    plain = [_without_calls(message) for message in messages]
    first, rest = (plain[0], plain[1:]) if plain[0]["role"] == "system" else ({"content": ""}, plain)
    content = f"{first['content']}\n\n{introduction}".lstrip()
    return [{"role": "system", "content": content}, *rest]


def _without_calls(message: Message) -> Message:
    """The message for a template that knows neither calls nor their results."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        content = "\n".join(filter(None, [message["content"], *map(_call_text, calls)]))
        return {"role": message["role"], "content": content}
    return message


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    text = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"
