"""Some hundred wrong requests: each is answered or told what is wrong with it, and the server is none the worse."""

from __future__ import annotations

from pathlib import Path

from multilora_engine.tritonserver import ServerProcess
from trials.fuzz_protocol import Fuzz, Tally, measure, read_facts

NUM_REQUESTS = 250


def test_every_request_is_answered_and_the_server_is_none_the_worse(
    server: ServerProcess, default_model_dir: Path, seed: int
) -> None:
    facts = read_facts(server.grpc_url, default_model_dir)
    fuzz = Fuzz(server.grpc_url, server.http_url, facts, seed, num_clients=4)
    tally, before = Tally(), measure(server)
    with fuzz.cached_adapter():
        canaries = fuzz.canaries()
        fuzz.run(range(NUM_REQUESTS), tally)
        assert fuzz.canaries() == canaries
    assert tally.failures == []
    assert sum(counts.total() for counts in tally.counts.values()) == NUM_REQUESTS
    assert measure(server).processes.keys() == before.processes.keys(), "a process died"
