"""`EngineStats`: numbers for an engine's operators. Plain values, apart from the engine: the fronts read them too."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


@dataclass(frozen=True)
class PrefixCacheStats:
    """Since the start, in tokens: the tokens of the sequences that started to run, and how many of them were in the
    cache. base_hit_tokens: of these, tokens of sequences with an adapter that came from blocks of the base model."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    base_hit_tokens: int = 0


@dataclass(frozen=True)
class PaceStats:
    """How steps keep to their target. target_seconds: of the last step with running answers, 0 before the first.

    Since the start: num_limited_steps had no time for further tokens of prompts, and in num_turns steps the running
    answers of a client over its share took turns.
    """

    target_seconds: float = 0.0
    num_limited_steps: int = 0
    num_turns: int = 0


@dataclass(frozen=True)
class PromptWaitStats:
    """longest_seconds: that a prompt which is not computed has waited until now, 0 without one. num_late: prompts
    since the start that have waited longer than MAX_PROMPT_WAIT_S."""

    longest_seconds: float = 0.0
    num_late: int = 0


@dataclass(frozen=True)
class WeightStats:
    """packed_bytes: of linears and embeddings as they were loaded. unpacked_bytes: of the floats kept beside codes, at
    most max_unpacked_bytes."""

    packed_bytes: int = 0
    unpacked_bytes: int = 0
    max_unpacked_bytes: int = 0


class WeightInfo(msgspec.Struct, frozen=True):
    """A quantised weight. modules: of the checkpoint; several that lie together are packed and unpacked together.

    kind: of the codes. packed_bytes: of the codes. unpacked_bytes: of its floats, which are multiplied; 0: the codes
    are. needed_bytes: of its floats if it has or gets them.
    """

    modules: list[str]
    kind: str
    packed_bytes: int
    unpacked_bytes: int
    needed_bytes: int


@dataclass(frozen=True)
class EngineStats:
    """A moment's numbers. Idle means: nothing waiting or running, all blocks free, no pins."""

    num_waiting: int = 0
    num_running: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    kv_cache_bytes: int = 0
    num_cached_adapters: int = 0
    num_pins: int = 0
    num_preemptions: int = 0
    prefix_cache: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    pace: PaceStats = field(default_factory=PaceStats)
    prompt_waits: PromptWaitStats = field(default_factory=PromptWaitStats)
    weights: WeightStats = field(default_factory=WeightStats)
    num_cuda_graphs: int = 0


@dataclass(frozen=True)
class AdaptersInUse:
    """Names, or task ids as text, of the adapters of requests that run, and of adapters that only wait. Both sorted.

    max_loras: distinct adapters that may run at once.
    """

    max_loras: int = 0
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
