"""The clients of TensorRT-LLM's Triton backend, and Triton's OpenAI front end."""

from __future__ import annotations

from client_program import ClientProgram

TRITON_PROGRAMS: tuple[ClientProgram, ...] = ()
