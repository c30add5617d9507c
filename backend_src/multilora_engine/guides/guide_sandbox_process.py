"""The program of the guide sandbox: `python -m multilora_engine.guides.guide_sandbox_process FD < token table`.

It compiles a guide, as `multilora_engine.sandbox_process` says, and answers with a `Trial`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from functools import partial

import msgspec
from llguidance import LLMatcher, LLTokenizer

from multilora_engine.guides.guide_grammar import TokenTable, grammar_of, make_matcher
from multilora_engine.request import Guide
from multilora_engine.sandbox_process import Limits, ignore_interrupts, serve

LIMITS = Limits(stack_bytes=8 << 20, memory_bytes=128 << 20, cpu_s=2)
"""Of the process of a guide. A chain of 2,000 rules of a grammar fits into the stack."""

_MASK_STACK_BYTES = 512 << 10
"""The stack of the thread that computes masks, and copies and drops matchers. In the engine, the thread of the steps
does this work with the system's 8 MiB of stack."""

_libc = ctypes.CDLL(None)
_mallinfo, _Number = (
    (_libc.mallinfo2, ctypes.c_size_t) if hasattr(_libc, "mallinfo2") else (_libc.mallinfo, ctypes.c_int)
)


class Trial(msgspec.Struct, frozen=True):
    """The result of compiling a guide. An empty `error` means success.

    grammar: the guide in llguidance's own form.
    build_s: CPU seconds to make a matcher of the grammar.
    kept_bytes: the memory that the compiled guide keeps.
    copy_bytes: the memory that each further copy of the matcher takes.
    """

    error: str = ""
    grammar: str = ""
    build_s: float = 0.0
    kept_bytes: int = 0
    copy_bytes: int = 0


def _try_guide(tokenizer: LLTokenizer, frame: bytes) -> bytes:
    return msgspec.msgpack.encode(_compile(msgspec.msgpack.decode(frame, type=Guide), tokenizer))


def _compile(guide: Guide, tokenizer: LLTokenizer) -> Trial:
    bytes_before = _used_bytes()
    try:
        grammar = grammar_of(guide)
        started_s = time.process_time()
        matcher = make_matcher(tokenizer, grammar)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        return Trial(error=f"{error}")
    if matcher.is_error():
        return Trial(error=matcher.get_error())
    build_s = time.process_time() - started_s
    copy_bytes: list[int] = []
    threading.stack_size(_MASK_STACK_BYTES)
    thread = threading.Thread(target=_use, args=(matcher, copy_bytes))
    thread.start()
    thread.join()
    kept_bytes = _used_bytes() - bytes_before
    return Trial(grammar=grammar, build_s=build_s, kept_bytes=kept_bytes, copy_bytes=max(0, *copy_bytes))


def _use(matcher: LLMatcher, copy_bytes: list[int]) -> None:
    """Copy the matcher, compute a mask and drop the copy, as the engine will."""
    first = matcher.deep_copy()
    first.compute_bitmask()
    before = _used_bytes()
    second = first.deep_copy()
    copy_bytes.append(_used_bytes() - before)
    del first, second


class _MallInfo(ctypes.Structure):
    """glibc's `mallinfo`: `uordblks` counts the bytes in use in its heaps, `hblkhd` the bytes of larger pieces."""

    _fields_ = [
        *((f"other{i}", _Number) for i in range(4)),
        ("hblkhd", _Number),
        *((f"other{i}", _Number) for i in range(4, 6)),
        ("uordblks", _Number),
        *((f"other{i}", _Number) for i in range(6, 8)),
    ]


_mallinfo.restype = _MallInfo


def _used_bytes() -> int:
    """The memory that the C library has given out."""
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def main() -> None:
    ignore_interrupts()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    tokenizer = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TokenTable).tokenizer()
    # The library keeps some things from its first grammar. Without this, each process would make them again.
    _compile(Guide("json"), tokenizer)
    serve(LIMITS, partial(_try_guide, tokenizer))


if __name__ == "__main__":
    main()
