"""The sandbox with guides that end their processes, and with processes that somebody else ends."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.fronts import TIMEOUT_S

from multilora_engine.errors import Cancelled, InvalidRequest, RequestError, Unavailable
from multilora_engine.guides.guide_grammar import TokenTable
from multilora_engine.guides.guide_sandbox import GuideSandbox, GuideWatch
from multilora_engine.guides.guide_sandbox_process import Trial
from multilora_engine.request import Guide

TABLE = TokenTable([*(bytes([i]) for i in range(256)), b"<end>"], [256], 256)
"""A token for each byte."""

FINE = Guide("regex", "[0-9]{4}")

ENDLESS = Guide("ebnf_grammar", 'start: p::0xffffffffffffffff\np::_ : "a" p::incr(_) | p::decr(_) "b"')

PATTERNS = [{"type": "string", "pattern": f"a{{{i}}}.*b{{{i}}}"} for i in range(1, 60)]


@pytest.fixture(scope="module")
def shared() -> Iterator[GuideSandbox]:
    sandbox = GuideSandbox(TABLE)
    yield sandbox
    sandbox.close()


@pytest.fixture
def sandbox() -> Iterator[GuideSandbox]:
    sandbox = GuideSandbox(TABLE)
    yield sandbox
    sandbox.close()


def outcome(sandbox: GuideSandbox, guide: Guide) -> Trial | RequestError:
    try:
        return sandbox.try_guide(guide, GuideWatch())
    except RequestError as error:
        return error


def pid_of(sandbox: GuideSandbox) -> int:
    assert sandbox._process is not None
    return sandbox._process.pid


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def lark_chain(length: int) -> Guide:
    rules = "\n".join(f"a{i}: a{i + 1}" for i in range(length))
    return Guide("ebnf_grammar", f'start: a0\n{rules}\na{length}: "x"')


def schema_chain(length: int, link: str) -> Guide:
    """link: a schema with REF in the place of a reference."""
    links = {f"{i}": json.loads(link.replace("REF", json.dumps({"$ref": f"#/$defs/{i + 1}"}))) for i in range(length)}
    schema = {"$ref": "#/$defs/0", "$defs": {**links, f"{length}": {"type": "integer"}}}
    return Guide("json_schema", json.dumps(schema, separators=(",", ":")))


def test_a_guide_that_works_comes_back_in_llguidances_own_form_with_what_it_takes(shared: GuideSandbox) -> None:
    watch = GuideWatch()
    trial = shared.try_guide(FINE, watch)
    assert "[0-9]{4}" in trial.grammar
    assert 0 < trial.copy_bytes < trial.kept_bytes < 1 << 20
    assert watch.seconds > 0


def test_what_a_guide_keeps_grows_with_what_it_says(shared: GuideSandbox) -> None:
    def kept(number: int) -> int:
        properties = {f"key {i}": {"type": "string", "maxLength": i} for i in range(number)}
        guide = Guide("json_schema", json.dumps({"type": "object", "properties": properties}))
        return shared.try_guide(guide, GuideWatch()).kept_bytes

    assert 4 * kept(20) < kept(320)


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (lark_chain(3000), "takes more than 8388608 bytes of stack"),
        (schema_chain(1200, '{"items":REF}'), "takes more than 8388608 bytes of stack"),
        (schema_chain(1200, '{"properties":{"a":REF}}'), "takes more than 8388608 bytes of stack"),
        (schema_chain(1400, '{"allOf":[REF]}'), "takes more than 8388608 bytes of stack"),
        (schema_chain(1200, '{"anyOf":[REF,{"type":"null"}]}'), "takes more than 8388608 bytes of stack"),
        (schema_chain(1200, '{"additionalProperties":REF}'), "takes more than 8388608 bytes of stack"),
        (schema_chain(1200, '{"prefixItems":[REF]}'), "takes more than 8388608 bytes of stack"),
        (Guide("ebnf_grammar", "start: T\nT: " + " & ".join(f"/.*a.{{{i}}}/" for i in range(1, 40))), " more than "),
        (Guide("json_schema", json.dumps({"allOf": PATTERNS})), " more than "),
        (ENDLESS, "the ebnf_grammar guide of 67 bytes takes more than 2 s to compile"),
    ],
    ids=[
        *("chain", "items", "properties", "allOf", "anyOf", "additionalProperties", "prefixItems"),
        *("intersections", "patterns", "endless"),
    ],
)
def test_a_guide_that_exceeds_a_limit_ends_its_own_process_and_no_other(
    shared: GuideSandbox, guide: Guide, message: str
) -> None:
    shared.try_guide(FINE, GuideWatch())
    before = pid_of(shared)
    result = outcome(shared, guide)
    assert isinstance(result, InvalidRequest)
    assert message in str(result)
    assert isinstance(shared.try_guide(FINE, GuideWatch()), Trial)
    assert pid_of(shared) == before


def test_while_a_guide_never_ends_others_are_compiled_and_it_ends_when_nobody_waits(shared: GuideSandbox) -> None:
    is_wanted = True
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(shared.try_guide, ENDLESS, GuideWatch(lambda: is_wanted))
        for _ in range(5):
            assert isinstance(shared.try_guide(FINE, GuideWatch()), Trial)
        is_wanted = False
        with pytest.raises((Cancelled, InvalidRequest)):  # on a fast machine its time may be over
            endless.result(TIMEOUT_S)


def test_after_the_process_of_processes_was_killed_the_next_guide_starts_it_again(sandbox: GuideSandbox) -> None:
    sandbox.try_guide(FINE, GuideWatch())
    first = pid_of(sandbox)
    os.kill(first, signal.SIGKILL)
    assert isinstance(sandbox.try_guide(FINE, GuideWatch()), Trial)
    assert pid_of(sandbox) != first


def test_whoever_is_killed_and_whenever_every_guide_has_one_end_and_others_are_compiled(sandbox: GuideSandbox) -> None:
    rng = random.Random(1)
    is_over = threading.Event()
    num_killed = 0

    def kill_at_random() -> None:
        nonlocal num_killed
        while not is_over.wait(rng.uniform(0, 0.03)):
            process = sandbox._process
            if process is None:
                continue
            victims = [process.pid, *children_of(process.pid) * 5]
            with_luck = rng.choice(victims)
            if process.poll() is None:
                try:
                    os.kill(with_luck, rng.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))
                    num_killed += 1
                except ProcessLookupError:
                    pass

    sandbox.try_guide(FINE, GuideWatch())
    killer = threading.Thread(target=kill_at_random)
    killer.start()
    guides = [Guide("regex", f"[0-9]{{{i}}}") if i % 3 else lark_chain(20 * i) for i in range(1, 61)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda guide: outcome(sandbox, guide), guides))
    is_over.set()
    killer.join()
    assert num_killed > 0
    assert all(isinstance(result, Trial | InvalidRequest | Unavailable) for result in results)
    assert all(isinstance(sandbox.try_guide(guide, GuideWatch()), Trial) for guide in guides[:5])


def test_the_sandbox_ends_with_the_process_that_started_it() -> None:
    program = (
        "import sys, time, threading\n"
        "from multilora_engine.request import Guide\n"
        "from multilora_engine.guides.guide_grammar import TokenTable\n"
        "from multilora_engine.guides.guide_sandbox import GuideSandbox, GuideWatch\n"
        "sandbox = GuideSandbox(TokenTable([bytes([i]) for i in range(256)] + [b'<end>'], [256], 256))\n"
        "sandbox.try_guide(Guide('regex', 'a+'), GuideWatch())\n"
        "print(sandbox._process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        process = os.pidfd_open(int(engine.stdout.readline()))
        engine.kill()
        poll = select.poll()
        poll.register(process, select.POLLIN)
        assert poll.poll(TIMEOUT_S * 1000), "the sandbox lives on"
        os.close(process)


def test_the_sandbox_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, multilora_engine.guides.guide_sandbox_process\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'tokenizers', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
