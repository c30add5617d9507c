"""What a worker counts, as Prometheus and Dynamo's router read it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from multilora_engine.dynamo.reports import BlockPublisher, block_hash
from multilora_engine.engine.block_events import BlockEvent, BlockEvents, BlockRemoved, BlockStored
from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats, PrefixCacheStats
from multilora_engine.engine.kv_cache import BlockAllocator
from multilora_engine.lora.adapter_state import CachedAdapter, Version
from multilora_engine.lora.life_cycle import LoRAStats, Residency, TierStats
from multilora_engine.process.operations import LoadReport, StatsReport
from multilora_engine.process.telemetry import RequestStats, Usage
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.sequences.sequence import Sequence as EngineSequence
from multilora_engine.serving.metrics import MetricName, Sample
from multilora_engine.text.text_stream import TextStream
from multilora_wire.layout import PageShape

reports = pytest.importorskip("multilora_engine.dynamo.reports", reason="ai-dynamo is not installed")

BYTES = MetricName("m_bytes", "GAUGE", "Bytes of a tier")
HITS = MetricName("m_hits_total", "COUNTER", "Hits")


def test_the_page_is_what_prometheus_reads() -> None:
    ugly = 'a "quoted" \\ name\nof two lines'
    page = reports.prometheus_page(
        [Sample(BYTES, (("tier", "host"),), 1e9), Sample(HITS, (), 3), Sample(BYTES, (("tier", ugly), ("x", "")), 0.25)]
    )
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert {name: (family.type, family.documentation) for name, family in families.items()} == {
        "m_bytes": ("gauge", "Bytes of a tier"),
        "m_hits": ("counter", "Hits"),
    }
    assert [(sample.labels, sample.value) for sample in families["m_bytes"].samples] == [
        ({"tier": "host"}, 1e9),
        ({"tier": ugly, "x": ""}, 0.25),
    ]
    assert [sample.value for sample in families["m_hits"].samples] == [3]


def test_reports_go_on_although_discovery_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_INTERVAL_S", 0.0)

    class Operator:
        async def stats(self) -> StatsReport:
            tiers = LoRAStats(*[TierStats()] * 3, insertions=0, replacements=0, waits=0, wait_seconds=0.0)
            return StatsReport(tiers, {}, Usage(), LoadReport(EngineStats(), AdaptersInUse(), RequestStats()))

    class Publisher:
        num_published = 0

        def publish(self, rank: int, snapshot: Any) -> None:
            self.num_published += 1

    async def tell(_: Residency) -> None:
        if publisher.num_published == 1:
            raise RuntimeError("discovery is gone")
        raise asyncio.CancelledError

    publisher = Publisher()
    reporter = reports.StatsReporter(Operator(), "tiny", lambda: 0, tell)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asyncio.wait_for(reporter.run(publisher), 30))
    assert publisher.num_published == 2


def test_the_load_of_a_worker() -> None:
    idle = reports.snapshot(EngineStats(num_blocks=8, num_free_blocks=8))
    assert (idle.kv_used_blocks, idle.gpu_cache_usage, idle.kv_cache_hit_rate) == (0, 0.0, None)
    busy = reports.snapshot(
        EngineStats(num_blocks=8, num_free_blocks=2, prefix_cache=PrefixCacheStats(queried_tokens=40, hit_tokens=10))
    )
    assert (busy.kv_used_blocks, busy.kv_total_blocks, busy.gpu_cache_usage) == (6, 8, 0.75)
    assert (busy.kv_cache_hit_rate, busy.dp_rank) == (0.25, 0)


BLOCK_SIZE = 16
_VIEW = Path(__file__).parents[2] / "support" / "dynamo_router_view.py"
_TIMEOUT_S = 300


class Router:
    """Has the blocks that it was told of, with what their hashes are made of. It refuses what it cannot place."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[tuple[int, ...], str | None, str | None]] = {}

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["type"] == "removed":
                for number in event["block_hashes"]:
                    del self.blocks[number]
            else:
                (number,) = event["block_hashes"]
                assert event["parent_hash"] is None or event["parent_hash"] in self.blocks
                self.blocks[number] = tuple(event["token_ids"]), event["lora_name"], event["cache_salt"]


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def publisher(router: Router) -> BlockPublisher:
    publisher = BlockPublisher()
    publisher.start(router)
    return publisher


def stored(key: int, parent: int | None = None, name: str = "", digest: str = "", tenant: str = "") -> BlockStored:
    parent_key = b"" if parent is None else bytes([parent]) * 32
    return BlockStored(bytes([key]) * 32, parent_key, [key, key], name, digest, tenant)


def numbers(*keys: int) -> set[int]:
    return {block_hash(bytes([key]) * 32) for key in keys}


def test_blocks_come_and_go(router: Router, publisher: BlockPublisher) -> None:
    publisher.on_events([stored(1), stored(2, 1, tenant="salt"), stored(3, name="x", digest="d")])
    assert list(router.blocks.values()) == [((1, 1), None, None), ((2, 2), None, "salt"), ((3, 3), "x", None)]
    publisher.on_events([BlockRemoved(bytes([2]) * 32), BlockRemoved(bytes([9]) * 32)])
    assert set(router.blocks) == numbers(1, 3)


def test_a_name_that_moved_takes_the_blocks_of_the_earlier_version_back(
    router: Router, publisher: BlockPublisher
) -> None:
    publisher.on_events([stored(1, name="x", digest="old"), stored(2, 1, "x", "old"), stored(3), stored(4, name="y")])
    publisher.on_events([stored(5, name="x", digest="new")])
    assert set(router.blocks) == numbers(3, 4, 5)
    publisher.on_events([BlockRemoved(bytes([1]) * 32), stored(6, 2, "x", "new")])
    assert set(router.blocks) == numbers(3, 4, 5), "block 6 follows a block that the router does not have"


def test_with_the_engine_go_all_blocks(router: Router, publisher: BlockPublisher) -> None:
    publisher.on_events([stored(1, name="x", digest="d"), stored(2)])
    publisher.on_loss()
    assert router.blocks == {}
    publisher.on_events([stored(2)])
    assert set(router.blocks) == numbers(2)


def test_a_name_without_blocks_takes_no_memory(publisher: BlockPublisher) -> None:
    for key in range(1, 200):
        publisher.on_events([stored(key, name=f"name {key}", digest=f"digest {key}"), BlockRemoved(bytes([key]) * 32)])
    assert [table for table in vars(publisher).values() if isinstance(table, dict) and table] == []


def test_before_there_is_a_router_nothing_is_told() -> None:
    publisher = BlockPublisher()
    publisher.on_events([stored(1)])
    router = Router()
    publisher.start(router)
    publisher.on_loss()
    publisher.on_events([stored(2, 1), stored(3)])
    assert set(router.blocks) == numbers(3), "block 2 follows a block that the router never had"


def sequence(tokens: list[int], name: str, salt: str, start: int = 0) -> EngineSequence:
    adapter = CachedAdapter(7, f"digest of {name}", ranks=(), shape=PageShape(0)) if name else None
    sender = Sender(tenant=salt)
    request = GenerationRequest("r", tokens, SamplingParams(max_tokens=1), lora_name=name, sender=sender)
    text = cast(TextStream, None)
    return EngineSequence(request, 0, adapter, text, Random(0), max_output_tokens=1, lora_start=start)


def computed(blocks: BlockAllocator, one: EngineSequence) -> None:
    start = blocks.start(one)
    blocks.commit(one, start, one.num_tokens)


def test_the_cache_tells_of_full_blocks_once_and_of_those_that_it_forgets() -> None:
    events = BlockEvents()
    blocks = BlockAllocator(4, BLOCK_SIZE, events=events)
    first = sequence(list(range(40)), "x", "")
    computed(blocks, first)
    assert events.take() == [], "nobody wanted them yet"
    blocks.free(first)
    events.want()
    again = sequence([*range(16), *range(100, 130)], "x", "salt")
    computed(blocks, again)
    told = events.take()
    known = [event for event in told if isinstance(event, BlockStored)]
    assert [event.token_ids for event in known] == [list(range(16)), list(range(100, 116))]
    assert [event.parent_key for event in known] == [b"", known[0].key]
    assert {(event.lora_name, event.digest, event.tenant) for event in known} == {("x", "digest of x", "salt")}
    assert sum(isinstance(event, BlockRemoved) for event in told) == 1, "three of four blocks were wanted, one was free"
    blocks.free(again)
    computed(blocks, sequence([*range(16), *range(100, 130)], "x", "salt"))
    assert events.take() == []


def test_versions_that_were_replaced_tell_nothing_more() -> None:
    events = BlockEvents()
    events.want()
    one = sequence(list(range(40)), "x", "")
    assert one.adapter is not None
    one.adapter.state.move(Version.RETIRED)
    computed(BlockAllocator(4, BLOCK_SIZE, events=events), one)
    assert events.take() == []


def test_a_block_is_told_as_the_one_s_who_computed_it(router: Router, publisher: BlockPublisher) -> None:
    events = BlockEvents()
    events.want()
    blocks = BlockAllocator(20, BLOCK_SIZE, events=events)
    tokens = list(range(70))
    computed(blocks, judge := sequence(tokens, "judge", "salt", start=40))
    told = [event for event in events.take() if isinstance(event, BlockStored)]
    assert [(event.lora_name, event.digest) for event in told] == [("", "")] * 2 + [("judge", "digest of judge")] * 2
    assert [event.parent_key for event in told] == [b"", *(event.key for event in told[:-1])]
    assert {event.tenant for event in told} == {"salt"}
    publisher.on_events(list(told))
    assert [name for _, name, _ in router.blocks.values()] == [None, None, "judge", "judge"]
    for name, start, number in (("guard", 33, 2), ("", 0, 2), ("judge", 40, 0), ("judge", 47, 2)):
        computed(blocks, sequence(tokens, name, "salt", start))
        assert len(events.take()) == number, (name, start)
    assert judge.adapter is not None
    judge.adapter.state.move(Version.RETIRED)
    other = sequence([9, *tokens], "judge", "salt", start=40)
    other.adapter = judge.adapter
    computed(blocks, other)
    told = [event for event in events.take() if isinstance(event, BlockStored)]
    assert [event.lora_name for event in told] == ["", ""], "blocks of the base outlive a version of an adapter"


def test_dynamo_s_router_knows_each_block_by_the_hash_of_its_tokens_name_and_salt(
    default_model_dir: Path, tmp_path: Path, seed: int
) -> None:
    llm = pytest.importorskip("dynamo.llm", reason="ai-dynamo is not installed")
    random, told = Random(seed), BlockEvents()
    told.want()
    blocks = BlockAllocator(2000, BLOCK_SIZE, events=told)
    expected = []
    for index in range(200):
        tokens = [random.randrange(49152) for _ in range(random.randrange(1, 120))]
        name = random.choice(["", "pirate", "org/adapter-1", f"a{index}"])
        salt = random.choice(["", "acme", f"s{index}"])
        start = random.choice([0, random.randrange(len(tokens))]) if name else 0
        computed(blocks, sequence(tokens, name, salt, start))
        of_base, of_adapter = (
            llm.compute_block_hash_for_seq(tokens, BLOCK_SIZE, lora_name=one, cache_namespace=salt or None)
            for one in (None, name or None)
        )
        num_base = start // BLOCK_SIZE
        expected += of_base[:num_base] + of_adapter[num_base:]
    events: list[BlockEvent] = told.take()
    environ = {"DYN_FILE_KV": str(tmp_path), "DYN_EVENT_PLANE_HOST": "127.0.0.1", "DYN_TCP_RPC_HOST": "127.0.0.1"}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in environ.items()), sys.executable, _VIEW, default_model_dir],
        input=msgspec.json.encode(events),
        stdout=subprocess.PIPE,
        check=True,
        timeout=_TIMEOUT_S,
    )
    known = {int(number): token_hash for number, token_hash in json.loads(done.stdout.splitlines()[-1]).items()}
    wanted = [block_hash(event.key) for event in events if isinstance(event, BlockStored)]
    assert len(wanted) == len(expected) > 400
    assert [known[number % 2**64] for number in wanted] == expected
