"""`TemplateSandbox`: renders chats by templates of adapters, which tenants write, in processes with limits.

It is the program of these processes, too: `python -m multilora_engine.text.template_sandbox FD`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import monotonic

import msgspec

from multilora_engine.errors import Cancelled, InvalidRequest, Unavailable
from multilora_engine.sandbox import Sandbox
from multilora_engine.sandbox_process import Limits, ignore_interrupts, serve
from multilora_engine.text.chat_rendering import Chat, render_chat
from multilora_engine.text.tokenizer_files import DEFAULT_TEMPLATE, load_bare_chats

_LIMITS = Limits(stack_bytes=8 << 20, memory_bytes=256 << 20, cpu_s=2)
"""Of the process that renders a chat. The longest chats, of 4 MiB, take most of the memory."""

_MAX_WAIT_S = 60.0
"""How long an answer is waited for, the start of the program included."""

_NICENESS = 10
"""Of the processes: the engine's steps go first."""


class _Work(msgspec.Struct, frozen=True):
    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]
    chat: Chat


class _Rendered(msgspec.Struct, frozen=True):
    pieces: list[str] = []
    error: str = ""


class TemplateSandbox(Sandbox):
    """Renders each chat in a process of its own."""

    def __init__(self) -> None:
        super().__init__("multilora_engine.text.template_sandbox", _LIMITS)

    def __del__(self) -> None:
        self.close()

    def render(self, templates: Mapping[str, str], named_tokens: Mapping[str, str], chat: Chat) -> list[str]:
        """`render_chat` by these templates, which may write these tokens by their names.

        Raises InvalidRequest, also if the template exceeds a limit, and Unavailable if there is no answer.
        """
        try:
            work = msgspec.msgpack.encode(_Work(dict(templates), dict(named_tokens), chat))
        except (UnicodeError, OverflowError) as error:
            raise InvalidRequest(f"the chat cannot be rendered: {error}") from None
        end_s = monotonic() + _MAX_WAIT_S
        try:
            outcome = self.ask(work, lambda: monotonic() < end_s)
        except Cancelled:
            raise Unavailable(f"the chat was not rendered within {_MAX_WAIT_S:g} s; try again") from None
        if outcome.content is None:
            raise InvalidRequest(f"the chat template takes more than {outcome.exceeded} for these messages")
        rendered = msgspec.msgpack.decode(outcome.content, type=_Rendered)
        if rendered.error:
            raise InvalidRequest(rendered.error)
        return rendered.pieces


def _render(frame: bytes) -> bytes:
    work = msgspec.msgpack.decode(frame, type=_Work)
    try:
        rendered = _Rendered(render_chat(load_bare_chats(work.templates, work.named_tokens), work.chat))
        return msgspec.msgpack.encode(rendered)
    except MemoryError:
        raise
    except InvalidRequest as error:
        message = str(error)
    except RecursionError:
        message = "messages are nested too deep for the chat template"
    except Exception as error:
        message = f"the chat template refused the messages: {type(error).__name__}: {error}"
    # A template may say what is no valid Unicode.
    return msgspec.msgpack.encode(_Rendered(error=message.encode("utf-8", "backslashreplace").decode()))


def main() -> None:
    ignore_interrupts()
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    # Without this, each process would import what renders a chat.
    template = "{{ strftime_now('%d') }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    hello = Chat([{"role": "user", "content": "Hello"}], None, {}, (), None)
    _render(msgspec.msgpack.encode(_Work({DEFAULT_TEMPLATE: template}, {}, hello)))
    serve(_LIMITS, _render)


if __name__ == "__main__":
    main()
