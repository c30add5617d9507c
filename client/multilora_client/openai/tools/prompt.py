"""Tools for a chat template that has no place for them: told in the system message, in the words of Hermes.

The conversation is written as such models write it: calls as `<tool_call>` in the assistant's turns, their results as
`<tool_response>` in the user's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from multilora_client.errors import InvalidRequest
from multilora_client.openai.errors import in_protocol_words

Message = Mapping[str, Any]

_NO_PLACE_FOR_TOOLS = "no place for tools"
"""The server's message about a chat template that would leave out tools, calls or their results."""

_INTRODUCTION = """\
You can call functions. Their signatures are in <tools></tools>:
<tools>
{tools}
</tools>
To call one, answer with its name and its arguments as a JSON object in <tool_call></tool_call>:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def told_instead(told: Sequence[Message] | None, error: InvalidRequest) -> Sequence[Message]:
    """What `tell_tools` made, where the server refused a chat for such a template. Raises any other error again, in the
    protocol's words.
    """
    if told is None or _NO_PLACE_FOR_TOOLS not in str(error):
        raise in_protocol_words(error)
    return told


def tell_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message] | None:
    """The messages with the tools, if there are any, at the end of their system message; None for a chat that has
    neither tools nor calls nor their results.
    """
    plain = [_without_calls(message) for message in messages]
    if not tools:
        return None if plain == [*messages] else plain
    introduction = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first, rest = (plain[0], plain[1:]) if plain[0]["role"] == "system" else ({"content": ""}, plain)
    content = f"{_text_of(first)}\n\n{introduction}".lstrip()
    return [{"role": "system", "content": content}, *rest]


def _without_calls(message: Message) -> Message:
    """The message for a template that knows neither calls nor their results."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text_of(message)}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        content = "\n".join(filter(None, [_text_of(message), *map(_call_text, calls)]))
        return {"role": message["role"], "content": content}
    return message


def _text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    text = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"
