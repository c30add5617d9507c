"""Programs and libraries that speak OpenAI's protocol."""

from __future__ import annotations

from client_program import ClientProgram

OPENAI_PROGRAMS: tuple[ClientProgram, ...] = ()
