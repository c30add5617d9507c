"""Blocks of the KV cache: who shares which, when they are known, and in which order they are forgotten."""

from __future__ import annotations

from random import Random
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st
from support.paged_memory import PoisonedBlocks

from multilora_engine.engine.block_events import BlockEvents, BlockRemoved, BlockStored
from multilora_engine.engine.kv_cache import BlockAllocator
from multilora_engine.lora.adapter_state import CachedAdapter
from multilora_engine.lora.layout import AdapterTraits
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.sequences.sequence import BlockCopy, Sequence, Source
from multilora_engine.text.text_stream import TextStream
from multilora_wire.layout import PageShape

BLOCK_SIZE = 4


def sequence(
    tokens: list[int],
    digest: str | None = None,
    tenant: str = "",
    start: int = 0,
    rope: str = "",
    source: list[int] | None = None,
) -> Sequence:
    traits = AdapterTraits(rope=rope)
    adapter = None if digest is None else CachedAdapter(7, digest, ranks=(), shape=PageShape(0), traits=traits)
    sender = Sender(tenant=tenant, name=tenant)
    request = GenerationRequest("r", tokens, SamplingParams(max_tokens=1), sender=sender, source_token_ids=source or [])
    one = Sequence(request, 0, adapter, cast(TextStream, None), Random(0), max_output_tokens=1, lora_start=start)
    one.source = None if source is None else Source(source)
    return one


def compute(blocks: PoisonedBlocks, one: Sequence, end: int | None = None) -> int:
    """Start a sequence and compute it, as far as `end`; for how many tokens nothing was to be done."""
    num_known = blocks.start(one)
    end = one.num_tokens if end is None else end
    blocks.check_read(one, num_known)
    if one.source is not None:
        encode(blocks, one, one.source)
    blocks.write(one, num_known, end)
    blocks.commit(one, num_known, end)
    return num_known


def encode(blocks: PoisonedBlocks, one: Sequence, source: Source) -> bool:
    """Encode the source of a sequence that has started, unless that is known; whether anything was to be done."""
    is_missing = not source.is_computed
    if is_missing:
        blocks.encode(one)
        source.is_computed = True
        blocks.commit_source(one)
    blocks.check_source(one)
    return is_missing


def test_full_blocks_of_equal_tokens_are_shared_and_the_last_token_is_always_computed() -> None:
    blocks = PoisonedBlocks(20, BLOCK_SIZE)
    first = sequence(list(range(10)))
    assert compute(blocks, first) == 0
    for tokens, known in [(list(range(10)), 8), (list(range(8)), 4), (list(range(9)), 8), ([0, 1, 2, 9, 4, 5], 0)]:
        other = sequence(tokens)
        assert compute(blocks, other) == known
        assert list(other.block_table)[: known // BLOCK_SIZE] == list(first.block_table)[: known // BLOCK_SIZE]
        assert (other.block_table.num_reused, other.block_table.num_allocated) == (
            known // BLOCK_SIZE,
            len(other.block_table),
        )
        blocks.check_integrity([first, other])
        blocks.free(other)
    assert (blocks.prefix_cache.queried_tokens, blocks.prefix_cache.hit_tokens) == (10 + 10 + 8 + 9 + 6, 8 + 4 + 8)


def test_what_is_not_computed_yet_is_not_known() -> None:
    blocks = PoisonedBlocks(20, BLOCK_SIZE)
    compute(blocks, sequence(list(range(12))), end=7)
    assert compute(blocks, sequence(list(range(12)))) == 4


def test_the_base_model_and_each_version_of_an_adapter_have_blocks_of_their_own() -> None:
    blocks = PoisonedBlocks(40, BLOCK_SIZE)
    tokens = list(range(9))
    for digest in (None, "a" * 32, "b" * 32):
        assert compute(blocks, sequence(tokens, digest)) == 0
    for digest in (None, "a" * 32, "b" * 32):
        assert compute(blocks, sequence(tokens, digest)) == 8


@settings(deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.sampled_from(["", "acme", "bolt"]), st.lists(st.integers(0, 1), min_size=1, max_size=14)),
        max_size=12,
    )
)
def test_what_is_reused_of_a_prompt_tells_of_the_tenants_own_prompts_alone(
    prompts: list[tuple[str, list[int]]],
) -> None:
    blocks = PoisonedBlocks(80, BLOCK_SIZE)
    seen: dict[str, list[list[int]]] = {}
    for tenant, tokens in prompts:
        known = [
            num_tokens
            for num_tokens in range(0, len(tokens), BLOCK_SIZE)
            if num_tokens == 0 or any(own[:num_tokens] == tokens[:num_tokens] for own in seen.get(tenant, []))
        ]
        assert compute(blocks, sequence(tokens, tenant=tenant)) == known[-1]
        seen.setdefault(tenant, []).append(tokens)


def test_adapters_that_start_later_share_the_blocks_before_that_with_the_base_and_with_each_other() -> None:
    tokens = list(range(18))
    for warm in (None, "a"):
        blocks = PoisonedBlocks(60, BLOCK_SIZE)
        assert compute(blocks, sequence(tokens, warm, start=10 if warm else 0)) == 0
        known = {
            ("b", 10): 8,  # two blocks end before the position
            ("b", 8): 8,
            ("b", 12): 12 if warm is None else 8,
            ("b", 3): 0,
            ("b", 0): 0,
            ("a", 11): 8,  # another position in the same block
            ("a", 10): 8 if warm is None else 16,
            ("a", 0): 0,
        }
        for (digest, start), num_tokens in known.items():
            one = sequence(tokens, digest, start=start)
            assert len(blocks._known_prefix(one)) * BLOCK_SIZE == num_tokens, (digest, start)
        assert compute(blocks, sequence(tokens)) == (16 if warm is None else 8)
        assert blocks.prefix_cache.base_hit_tokens == 0
        assert compute(blocks, sequence(tokens, "c", start=17)) == 16
        assert blocks.prefix_cache.base_hit_tokens == 16
        assert compute(blocks, sequence(tokens, "c", start=9)) == 8
        assert compute(blocks, sequence(tokens, "c", start=9)) == 16
        assert blocks.prefix_cache.base_hit_tokens == 16 + 8 + 8


@settings(deadline=None, max_examples=300)
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(["", "acme"]),
            st.sampled_from([None, "a", "b", "a rope"]),
            st.lists(st.integers(0, 1), min_size=1, max_size=14),
            st.integers(0, 13),
        ),
        max_size=14,
    )
)
def test_exactly_what_would_be_computed_again_is_reused(
    asked: list[tuple[str, str | None, list[int], int]],
) -> None:
    """Against a model that has no keys: it remembers who computed each token, after which others.

    The adapter `a rope` has rotary embeddings of its own: all its blocks are of itself and of its position.
    """
    blocks = PoisonedBlocks(80, BLOCK_SIZE)
    seen: set[tuple[str, tuple[tuple[str, int], ...]]] = set()
    for tenant, digest, tokens, at in asked:
        start = 0 if digest is None else at % len(tokens)
        rope = "linear" if digest == "a rope" else ""
        before = f"{digest} from {start}" if rope else ""
        computed = tuple((before if i < start or rope else digest or "", token) for i, token in enumerate(tokens))
        ends = range(BLOCK_SIZE, len(tokens), BLOCK_SIZE)
        known = max((end for end in ends if (tenant, computed[:end]) in seen), default=0)
        one = sequence(tokens, digest, tenant, start, rope)
        assert compute(blocks, one) == known
        seen.update((tenant, computed[:end]) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE))
        blocks.free(one)
        blocks.check_integrity([])


@settings(deadline=None, max_examples=200)
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(["", "acme"]),
            st.sampled_from([None, "a", "b"]),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
            st.lists(st.integers(0, 1), min_size=1, max_size=9),
        ),
        max_size=14,
    )
)
def test_a_source_is_reused_whole_and_prompts_are_after_equal_sources_alone(
    asked: list[tuple[str, str | None, list[int], list[int]]],
) -> None:
    """Against a model without keys: tenants' sources by adapter, and the beginnings that were computed after each."""
    blocks = PoisonedBlocks(120, BLOCK_SIZE)
    seen: set[tuple[object, ...]] = set()
    num_queried = num_hit = 0
    for tenant, digest, source, tokens in asked:
        whole = (tenant, digest, tuple(source))
        ends = range(BLOCK_SIZE, len(tokens), BLOCK_SIZE)
        known = max((end for end in ends if (*whole, tuple(tokens[:end])) in seen), default=0)
        one = sequence(tokens, digest, tenant, source=source)
        assert blocks.knows_source(one) == (whole in seen)
        assert compute(blocks, one) == known
        num_queried += len(source)
        num_hit += len(source) * (whole in seen)
        assert one.num_cached_tokens == len(source) * (whole in seen)
        assert one.perf.kv_cache_alloc_total_blocks == -(-len(source) // BLOCK_SIZE) - (-len(tokens) // BLOCK_SIZE)
        seen.add(whole)
        seen.update((*whole, tuple(tokens[:end])) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE))
        blocks.check_integrity([one])
        blocks.free(one)
        blocks.check_integrity([])
    assert (blocks.prefix_cache.queried_tokens, blocks.prefix_cache.hit_tokens) == (num_queried, num_hit)


def test_a_source_that_lost_a_block_is_encoded_again_and_one_that_is_not_committed_is_not_known() -> None:
    blocks = PoisonedBlocks(4, BLOCK_SIZE)
    first = sequence([1], source=[5] * 9)
    blocks.start(first)
    assert not blocks.knows_source(sequence([1], source=[5] * 9))
    blocks.free(first)
    assert not blocks.knows_source(sequence([1], source=[5] * 9))
    compute(blocks, first)
    assert blocks.knows_source(sequence([1], source=[5] * 9))
    assert not blocks.can_start(sequence([1] * 5, source=[5] * 9))
    blocks.free(first)
    assert blocks.can_start(sequence([1], source=[5] * 9))
    other, again = sequence([2] * 8), sequence([1], source=[5] * 9)
    compute(blocks, other)
    assert not blocks.knows_source(again)
    blocks.free(other)
    compute(blocks, again)
    assert again.source is not None
    assert again.source.block_table.num_reused == 0
    assert not PoisonedBlocks(9, BLOCK_SIZE, enable_prefix_caching=False).knows_source(again)


def test_blocks_of_a_known_source_that_somebody_uses_are_not_needed_again() -> None:
    blocks = PoisonedBlocks(4, BLOCK_SIZE)
    first = sequence([1], source=[5] * 8)
    compute(blocks, first)
    second = sequence([2], source=[5] * 8)
    assert blocks.can_start(second)
    compute(blocks, second)
    assert (blocks.num_free, second.num_cached_tokens) == (0, 8)
    assert not blocks.can_start(sequence([3], source=[5] * 8))
    blocks.check_integrity([first, second])


def test_no_router_is_told_of_blocks_after_a_source() -> None:
    events = BlockEvents()
    events.want()
    blocks = BlockAllocator(40, BLOCK_SIZE, events=events)
    one = sequence([1] * 9, source=[2] * 9)
    blocks.start(one)
    blocks.commit_source(one)
    blocks.commit(one, 0, 9)
    assert blocks.knows_source(sequence([1], source=[2] * 9))
    assert not events.take()
    blocks.forget_known()
    assert not blocks.knows_source(sequence([1], source=[2] * 9))


def test_a_block_is_only_found_after_the_blocks_it_was_computed_after() -> None:
    blocks = PoisonedBlocks(20, BLOCK_SIZE)
    compute(blocks, sequence([1, 1, 1, 1, 2, 2, 2, 2, 3]))
    assert compute(blocks, sequence([2, 2, 2, 2, 3])) == 0
    assert compute(blocks, sequence([5, 5, 5, 5, 2, 2, 2, 2, 3])) == 0


def test_after_a_switch_of_weights_nobody_finds_what_was_computed_before_or_goes_on_from_there() -> None:
    events = BlockEvents()
    events.want()
    blocks = BlockAllocator(40, BLOCK_SIZE, events=events)

    def start(one: Sequence, end: int) -> int:
        num_known = blocks.start(one)
        blocks.commit(one, num_known, end)
        return num_known

    ended, running, waiting = (sequence([1] * 13) for _ in range(3))
    start(ended, 13)
    blocks.free(ended)
    assert start(running, 9) == 12
    assert blocks.can_start(waiting)
    stored = [event.key for event in events.take() if isinstance(event, BlockStored)]

    blocks.forget_known()
    assert [event.key for event in events.take() if isinstance(event, BlockRemoved)] == stored
    running.output_token_ids += [1] * 4
    assert blocks.grow(running, 17)
    blocks.commit(running, 13, 17)
    assert not events.take()
    assert start(waiting, 5) == 0
    assert start(sequence([1] * 17), 17) == 4
    assert start(sequence([1] * 17), 17) == 16


def test_without_prefix_caching_nothing_is_known() -> None:
    blocks = PoisonedBlocks(20, BLOCK_SIZE, enable_prefix_caching=False)
    assert compute(blocks, sequence([1] * 9)) == 0
    assert compute(blocks, sequence([1] * 9)) == 0
    assert blocks.prefix_cache.hit_tokens == 0


def test_unknown_blocks_go_first_then_the_least_recently_used_from_the_end_of_a_sequence() -> None:
    blocks = PoisonedBlocks(6, BLOCK_SIZE)
    old, new = sequence([1] * 9), sequence([2] * 9)
    compute(blocks, old)
    compute(blocks, new)
    blocks.free(old)
    blocks.free(new)
    tables = blocks.num_free
    assert tables == 6
    third = sequence([3] * 12)
    compute(blocks, third)
    # The two half-filled blocks, and the second block of the old sequence.
    for tokens, known in [([1] * 9, 4), ([2] * 9, 8)]:
        assert len(blocks._known_prefix(sequence(tokens))) * BLOCK_SIZE == known
    blocks.free(third)
    assert compute(blocks, sequence([2] * 9)) == 8


def test_known_blocks_count_as_free_until_somebody_uses_them() -> None:
    blocks = PoisonedBlocks(4, BLOCK_SIZE)
    first = sequence([1] * 16)
    compute(blocks, first)
    assert not blocks.can_start(sequence([1] * 17))
    assert not blocks.can_start(sequence([1] * 16))
    blocks.free(first)
    assert blocks.num_free == 4
    again = sequence([1] * 16)
    assert blocks.can_start(again)
    assert compute(blocks, again) == 12
    shared = sequence([1] * 9)
    assert not blocks.can_start(shared)


def test_branches_share_full_blocks_and_copy_the_last() -> None:
    blocks = PoisonedBlocks(4, BLOCK_SIZE)
    first, second, third = (sequence([1] * 10) for _ in range(3))
    compute(blocks, first)
    first.num_computed_tokens = second.num_computed_tokens = 10
    table = list(first.block_table)
    assert blocks.branch([first], [first, second], [0, 0]) == [BlockCopy(table[2], second.block_table[2])]
    assert (list(first.block_table), list(second.block_table)[:2]) == (table, table[:2])
    blocks.copy(table[2], second.block_table[2])
    blocks.check_read(second, 10)
    second_table = list(second.block_table)
    assert blocks.branch([first, second], [first, second], [1, 0]) == []
    assert (list(first.block_table), list(second.block_table)) == (second_table, table)
    assert blocks.branch([first, second], [first, second], [1, 1]) == [BlockCopy(table[2], second_table[2])]
    blocks.check_integrity([first, second])
    assert blocks.branch([first, second], [first, second, third], [0, 1, 1]) is None
    for one in (first, second):
        blocks.free(one)
    assert blocks.num_free == 4


def branch(blocks: PoisonedBlocks, beams: list[Sequence], parents: list[int]) -> list[Sequence] | None:
    """What `beams` become, as the engine does it; None when there was no room, and they are freed."""
    answers = [list(beams[parent].output_token_ids) for parent in parents]
    spare = [beams[0].sibling() for _ in parents[len(beams) :]]
    after = [*beams, *spare][: len(parents)]
    copies = blocks.branch(beams, after, parents)
    if copies is None:
        for one in beams:
            blocks.free(one)
        return None
    for copy in copies:
        blocks.copy(copy.source, copy.target)
    num_computed = beams[parents[0]].num_computed_tokens
    for one, answer in zip(after, answers, strict=True):
        one.output_token_ids, one.num_computed_tokens = answer, num_computed
    return after


def test_beams_that_change_places_are_known_by_the_tokens_they_took_over() -> None:
    blocks = PoisonedBlocks(20, BLOCK_SIZE)
    one = sequence([1] * 4)
    compute(blocks, one)
    one.num_computed_tokens = 4
    beams = branch(blocks, [one], [0, 0])
    for parents, tokens in (([0, 1], (5, 6)), ([1, 0], (7, 8))):
        assert beams is not None
        beams = branch(blocks, beams, parents)
        assert beams is not None
        for beam, token in zip(beams, tokens, strict=True):
            start = beam.num_tokens
            beam.output_token_ids += [token] * 4
            assert blocks.grow(beam, start + 4)
            blocks.write(beam, start, start + 4)
            blocks.commit(beam, start, start + 4)
            beam.num_computed_tokens = start + 4
    known = {(6, 7): 12, (5, 8): 12, (5, 7): 8, (6, 8): 8}
    for (first, second), num_tokens in known.items():
        assert compute(blocks, sequence([1] * 4 + [first] * 4 + [second] * 4 + [9])) == num_tokens


def test_beams_that_find_no_blocks_start_again_from_the_tokens_they_took_over() -> None:
    blocks = PoisonedBlocks(7, BLOCK_SIZE)
    one = sequence([1] * 4)
    compute(blocks, one)
    one.num_computed_tokens = 4
    beams = branch(blocks, [one], [0, 0])
    assert beams is not None
    for beam, token in zip(beams, (5, 6), strict=True):
        beam.output_token_ids += [token] * 6
        assert blocks.grow(beam, 10)
        blocks.write(beam, 4, 10)
        blocks.commit(beam, 4, 10)
        beam.num_computed_tokens = 10
    others = [sequence([9 + i] * 4) for i in range(2)]
    for other in others:
        compute(blocks, other)
    assert branch(blocks, beams, [1, 0, 0]) is None
    for other in others:
        blocks.free(other)
    for beam, token in zip(beams, (6, 5), strict=True):
        beam.output_token_ids = [token] * 6
        assert compute(blocks, beam) == 8


@settings(max_examples=150, deadline=None)
@given(num_blocks=st.integers(6, 40), has_sources=st.booleans(), seed=st.integers(0, 1 << 30))
def test_nobody_ever_reads_what_is_not_its_own(num_blocks: int, has_sources: bool, seed: int) -> None:
    """Searches of any number of beams, which come and go, and share what they have in common with all others."""
    blocks, rng = PoisonedBlocks(num_blocks, BLOCK_SIZE), Random(seed)
    running: list[list[Sequence]] = []
    seen = [[0]]
    for _ in range(80):
        action = rng.choice(["start", "branch", "decode", "decode", "decode", "free"])
        if action == "start":
            known = rng.choice(seen)
            prompt = known[: rng.randrange(1, len(known) + 1)] + [rng.randrange(2) for _ in range(rng.randrange(6))]
            digest = rng.choice([None, "a"])
            source = None
            if has_sources:
                source = [rng.randrange(2) for _ in range(rng.randrange(1, 10))]
            start = rng.randrange(len(prompt)) if digest and not has_sources else 0
            one = sequence(prompt, digest, start=start, source=source)
            if blocks.can_start(one):
                compute(blocks, one)
                one.num_computed_tokens = one.num_tokens
                running.append([one])
        elif running:
            beams = running.pop(rng.randrange(len(running)))
            for one in beams:
                blocks.check_read(one, one.num_computed_tokens)
                if has_sources:
                    blocks.check_source(one)
            if action == "branch":
                parents = [rng.randrange(len(beams)) for _ in range(rng.randrange(1, 5))]
                beams = branch(blocks, beams, parents) or []
            elif action == "free" or not all(blocks.grow(one, one.num_computed_tokens + 1) for one in beams):
                for one in beams:
                    blocks.free(one)
                beams = []
            for one in beams if action == "decode" else ():
                one.output_token_ids.append(rng.randrange(2))
                blocks.write(one, one.num_computed_tokens, one.num_tokens)
                blocks.commit(one, one.num_computed_tokens, one.num_tokens)
                one.num_computed_tokens = one.num_tokens
                seen.append(one.token_ids(0, one.num_tokens))
            running += [beams] if beams else []
        blocks.check_integrity(one for beams in running for one in beams)
    for beams in running:
        for one in beams:
            blocks.check_read(one, one.num_computed_tokens)
            if has_sources:
                blocks.check_source(one)
            blocks.free(one)
    assert blocks.num_free == num_blocks
