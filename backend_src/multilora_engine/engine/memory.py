"""How much memory the KV cache and the adapter tiers get, decided once at start, and told in plain words."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from multilora_engine.config import LEAST_HOST_TIER_BYTES, EngineConfig
from multilora_engine.errors import ConfigError
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.models.model import kv_groups
from multilora_engine.models.model_config import ModelConfig
from multilora_kernels.control_groups import control_groups
from multilora_wire.layout import AdapterLayout, adapter_pages, header_pages, whole_pages

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes. proc, groups: the root of procfs and of the control groups (version 2).

    Files that Linux holds in memory and can drop count as available.
    """
    machine = _fields(proc / "meminfo")["MemAvailable"] * 1024
    return max(0, min([machine, *_left_in_groups(proc, groups)]))


def wait_for_freed_memory(memory: Callable[[], tuple[int, int]], pause: Callable[[float], None] = time.sleep) -> None:
    """Wait until the memory of a GPU that an ended process had is free: until its free bytes grow no more.

    memory: free bytes and all bytes, as `torch.cuda.mem_get_info` tells. Returns at once if nobody else has any.
    """
    first, total = memory()
    before, num_looks, num_quiet = first, 0, 0
    while total - before > _CONTEXT_BYTES and num_quiet < _QUIET_LOOKS and num_looks < _MOST_LOOKS:
        pause(_LOOK_S)
        free, _ = memory()
        num_looks, num_quiet = num_looks + 1, 0 if free - before > _GROWTH_BYTES else num_quiet + 1
        before = free
    if num_looks:
        _logger.log(
            logging.WARNING if num_looks == _MOST_LOOKS else logging.INFO,
            "waited %.1f s for other processes' memory of the GPU: %.2f GiB became free, %.2f of %.2f GiB are free%s",
            num_looks * _LOOK_S,
            max(0, before - first) / _GIB,
            before / _GIB,
            total / _GIB,
            ", and more may follow: the KV cache may be smaller than it could be" if num_looks == _MOST_LOOKS else "",
        )


def give_back_freed_memory() -> None:
    """Give Linux the memory that was freed and that the C library keeps for later, where that is glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """The bytes that each control group of this process may still take; groups without a limit are left out."""
    for folder in control_groups(proc, groups):
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text())
            used = int((folder / "memory.current").read_text())
            yield limit - used + _fields(folder / "memory.stat")["inactive_file"]


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file whose lines are `name number` or `name: number unit`."""
    lines = (line.replace(":", " ").split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


_logger = logging.getLogger(__name__)

_CPU_KV_CACHE_BYTES = 1 << 30
_GIB = 1 << 30
_FEWEST_TOKENS = 128
"""Of a sequence, unless `max_model_len` asks for fewer: a chat template alone takes dozens."""

_LOOK_S, _QUIET_LOOKS, _MOST_LOOKS = 0.5, 4, 60
"""Between two looks at the memory that an ended process had; in a row that see it grow no more; in all."""

_CONTEXT_BYTES = 1 << 30
"""More than a process takes of an empty GPU before it loads anything."""

_GROWTH_BYTES = 16 << 20
"""Processes that serve take and free as much at any time."""

_USUAL_RANK = 16
_LEAST_DEVICE_SHARE, _LARGEST_DEVICE_SHARE = 0.05, 0.5
"""Of the memory that a GPU's KV cache and device tier share."""


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a GPU's memory that steps need beside weights, KV cache and adapters.

    step: the largest one's work. graphs: what captured steps keep. sampling: the choice of tokens, or a piece of a
    prompt's logits. tables: of tokens and adapters, which outlive a step.
    """

    step: int
    graphs: int
    sampling: int
    tables: int

    @property
    def total(self) -> int:
        return self.step + self.graphs + self.sampling + self.tables

    def __str__(self) -> str:
        parts = {"the largest step": self.step, "CUDA graphs": self.graphs, "sampling": self.sampling}
        told = ", ".join(f"{name} {num_bytes / _GIB:.2f} GiB" for name, num_bytes in parts.items())
        return f"{told}, tables {self.tables / _GIB:.2f} GiB"


NO_STEP_BYTES = StepBytes(0, 0, 0, 0)


@dataclass(frozen=True)
class MemoryPlan:
    """The sizes of everything that is not weights.

    num_blocks, kv_dtype: KV cache. num_host_pages, num_device_pages: adapter tiers; on a CPU they are the same pages.
    spare_bytes: of the device's memory, that nothing else takes: for the floats of `UnpackedWeights`.
    steps: what was kept free of it for steps.
    """

    num_blocks: int
    kv_dtype: torch.dtype
    num_host_pages: int
    num_device_pages: int
    max_model_len: int
    spare_bytes: int = 0
    steps: StepBytes = NO_STEP_BYTES


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    layout: AdapterLayout,
    kv_dtype: torch.dtype,
    device: torch.device,
    steps: StepBytes = NO_STEP_BYTES,
) -> MemoryPlan:
    """Divide the memory. Call it after the weights are loaded: a GPU's budget is the memory they left.

    config: as `on_device` gives it.
    kv_dtype: of the KV cache. steps: what a GPU's steps need.
    Raises ConfigError when a tier whose size the operator has written cannot hold one adapter of the largest legal
    size, or the KV cache one sequence.
    """
    lora = config.lora
    if device.type == "cpu":
        kv_bytes = int(config.kv_cache_memory_bytes) or _CPU_KV_CACHE_BYTES
        available = available_memory()
        num_host_pages = _host_tier_bytes(config, layout, device, available - kv_bytes) // layout.page_bytes
        num_device_pages = num_host_pages
    else:
        kv_bytes, num_device_pages, spare_bytes = divide_gpu(config, layout, *torch.cuda.mem_get_info(device), steps)
        available = available_memory()
        num_host_pages = _host_tier_bytes(config, layout, device, available) // layout.page_bytes
        _check_host_tier(config, layout, num_host_pages * layout.page_bytes, available)
        if lora.lora_cache_gpu_memory_fraction:
            _check_tier(layout, num_device_pages, "device", "lora_cache_gpu_memory_fraction")
    if lora.lora_cache_host_memory_bytes:
        _check_tier(layout, num_host_pages, "host", "lora_cache_host_memory_bytes")
    has_disk_size = lora.lora_cache_disk_bytes != LoRAConfig.model_fields["lora_cache_disk_bytes"].default
    if lora.lora_cache_dir is not None and has_disk_size:
        _check_tier(layout, _disk_pages(config, layout), "disk", "lora_cache_disk_bytes", header_pages(layout))
    num_blocks = kv_bytes // (config.block_size * kv_bytes_per_token(model, kv_dtype))
    if device.type == "cpu":
        spare_bytes = _check_machine(kv_bytes, num_host_pages * layout.page_bytes, available)
    max_model_len = _max_model_len(config, model, num_blocks)
    plan = MemoryPlan(num_blocks, kv_dtype, num_host_pages, num_device_pages, max_model_len, spare_bytes, steps)
    _report(plan, config, layout, device)
    if model.source is not None:
        longest, token_bytes = model.source.longest(config.max_num_encoder_tokens), kv_bytes_per_token(model, kv_dtype)
        _logger.info(
            "a source takes %d bytes of the KV cache for each of its tokens, once; the longest, of %d tokens, %.2f MiB",
            token_bytes,
            longest,
            longest * token_bytes / (1 << 20),
        )
    return plan


def kv_bytes_per_token(model: ModelConfig, kv_dtype: torch.dtype) -> int:
    """Keys and values of one token in all layers."""
    return sum(group.bytes_per_token(kv_dtype) for group in kv_groups(model))


def divide_gpu(
    config: EngineConfig, layout: AdapterLayout, free: int, total: int, steps: StepBytes
) -> tuple[int, int, int]:
    """Bytes of the KV cache, pages of the device tier and bytes left, of `total` bytes of a GPU that has `free` left.

    Raises ConfigError when nothing is left.
    """
    budget = free - steps.total - int(total * (1 - config.gpu_memory_utilization))
    if budget <= 0:
        raise ConfigError(
            f"the weights leave {free / _GIB:.2f} GiB of {total / _GIB:.2f} GiB, of which steps need "
            f"{steps.total / _GIB:.2f} GiB ({steps}): nothing is left within gpu_memory_utilization="
            f"{config.gpu_memory_utilization}; write a larger one, a smaller max_num_batched_tokens or max_num_seqs, "
            "or serve a smaller model"
        )
    device_tier_bytes = _device_tier_bytes(config, layout, budget)
    left = budget - device_tier_bytes
    kv_bytes = min(int(config.kv_cache_memory_bytes) or left, left)
    return kv_bytes, device_tier_bytes // layout.page_bytes, left - kv_bytes


def _adapters_of_a_step(config: EngineConfig, layout: AdapterLayout) -> tuple[int, str]:
    """Bytes of as many adapters of a usual rank as may share a step, or of one of that rank with embeddings and head,
    or of the largest rank that is accepted, whichever takes most; and a sentence about it.
    """
    rank = min(_USUAL_RANK, layout.max_rank)
    usual = config.lora.max_loras * adapter_pages(layout, rank)
    largest = adapter_pages(layout, layout.max_rank, is_dora=True)
    whole = whole_pages(layout, rank)
    meaning = f"{config.lora.max_loras} adapters of rank {rank}, which may share a step,"
    if whole > usual:
        meaning = f"an adapter of rank {rank} with embeddings and head"
    if largest > max(usual, whole):
        meaning = f"the largest adapter, of rank {layout.max_rank},"
    num_bytes = max(usual, whole, largest) * layout.page_bytes
    return num_bytes, f"{meaning} take {num_bytes / _GIB:.2f} GiB"


def _host_tier_bytes(config: EngineConfig, layout: AdapterLayout, device: torch.device, available: int) -> int:
    """A GPU's host tier has room for the adapters of a step and of waiting requests; a CPU's for one adapter with
    embeddings and head.

    available: memory. An adapter that nobody has sent may be larger than that: then the tier is as large as memory
    allows.
    """
    if config.lora.lora_cache_host_memory_bytes:
        return int(config.lora.lora_cache_host_memory_bytes)
    if device.type == "cpu":
        wanted = whole_pages(layout, min(_USUAL_RANK, layout.max_rank)) * layout.page_bytes
        return max(LEAST_HOST_TIER_BYTES, min(wanted, available))
    num_bytes, _ = _adapters_of_a_step(config, layout)
    wanted = 2 * num_bytes
    return max(LEAST_HOST_TIER_BYTES, wanted if wanted <= available else available // 2)


def _device_tier_bytes(config: EngineConfig, layout: AdapterLayout, budget: int) -> int:
    """budget: the memory that KV cache and device tier share."""
    if config.lora.lora_cache_gpu_memory_fraction:
        return int(budget * config.lora.lora_cache_gpu_memory_fraction)
    num_bytes, adapters = _adapters_of_a_step(config, layout)
    if num_bytes > (most := int(budget * _LARGEST_DEVICE_SHARE)):
        _logger.warning(
            "%s, more than half of the %.2f GiB that the weights and steps leave: the device tier has %.2f GiB, and "
            "adapters that do not fit together wait for each other",
            adapters,
            budget / _GIB,
            most / _GIB,
        )
    return max(min(num_bytes, most), int(budget * _LEAST_DEVICE_SHARE))


def _check_host_tier(config: EngineConfig, layout: AdapterLayout, num_bytes: int, available: int) -> None:
    """It is locked in memory at once."""
    if num_bytes > available:
        raise ConfigError(
            f"the machine has {available / _GIB:.2f} GiB of memory left, too few for a host tier of "
            f"{num_bytes / _GIB:.2f} GiB; {_adapters_of_a_step(config, layout)[1]}: write a smaller "
            "lora_cache_host_memory_bytes or max_loras"
        )


def _check_machine(kv_bytes: int, host_tier_bytes: int, available: int) -> int:
    """All of these fill up while requests are served. A lack of memory would end the process then, so it stops the
    load. Returns the bytes that are left.
    """
    if kv_bytes + host_tier_bytes > available:
        raise ConfigError(
            f"the weights leave {available / _GIB:.2f} GiB of memory, too few for a KV cache of {kv_bytes / _GIB:.2f} "
            f"GiB and a host tier of {host_tier_bytes / _GIB:.2f} GiB; write a smaller kv_cache_memory_bytes or "
            "lora_cache_host_memory_bytes"
        )
    return available - kv_bytes - host_tier_bytes


def _disk_pages(config: EngineConfig, layout: AdapterLayout) -> int:
    """Pages that the disk tier holds."""
    return max(0, config.lora.lora_cache_disk_bytes // layout.page_bytes - header_pages(layout))


def _check_tier(layout: AdapterLayout, num_pages: int, tier: str, parameter: str, num_spent: int = 0) -> None:
    """num_spent: pages of the parameter's bytes that hold something else."""
    needed = adapter_pages(layout, layout.max_rank, is_dora=True)
    if num_pages < needed:
        num_bytes = (needed + num_spent) * layout.page_bytes
        raise ConfigError(
            f"Not enough space allocated to {tier} LoRA cache to hold 1 max sized LoRA: {num_pages} pages < {needed} "
            f"pages of {layout.page_bytes} bytes; raise {parameter} to hold {num_bytes} bytes, or lower max_lora_rank "
            f"({layout.max_rank})"
        )


def _max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    kv_tokens = num_blocks * config.block_size
    wanted = config.max_model_len or model.max_position_embeddings
    if config.max_model_len > kv_tokens or kv_tokens == 0:
        raise ConfigError(
            f"the KV cache holds {kv_tokens} tokens in blocks of {config.block_size}, fewer than max_model_len "
            f"({wanted}); raise kv_cache_memory_bytes, or write a smaller max_model_len"
        )
    if kv_tokens < min(wanted, _FEWEST_TOKENS):
        raise ConfigError(
            f"the KV cache holds {kv_tokens} tokens, too few for a prompt and its answer; raise kv_cache_memory_bytes, "
            f"or write the longest sequence as max_model_len (the checkpoint's own limit is {wanted})"
        )
    if kv_tokens < wanted:
        _logger.warning(
            "the KV cache holds %d tokens, so that sequences end there and not at the checkpoint's %d: raise "
            "kv_cache_memory_bytes, or write a smaller max_model_len",
            kv_tokens,
            wanted,
        )
    if wanted > model.max_position_embeddings:
        _logger.warning(
            "max_model_len is %d, beyond the checkpoint's own limit of %d tokens: answers may be of less use there",
            wanted,
            model.max_position_embeddings,
        )
    return min(wanted, kv_tokens)


def _report(plan: MemoryPlan, config: EngineConfig, layout: AdapterLayout, device: torch.device) -> None:
    tokens = plan.num_blocks * config.block_size
    _logger.info(
        "KV cache: %d tokens in blocks of %d, stored as %s; longest sequence %d",
        tokens,
        config.block_size,
        str(plan.kv_dtype).removeprefix("torch."),
        plan.max_model_len,
    )
    _logger.info(
        "a step has at most %d tokens, %d sequences and %d adapters",
        config.max_num_batched_tokens,
        config.max_num_seqs,
        config.lora.max_loras,
    )
    _logger.info("adapters are stored as %s in pages of %.0f KiB", layout.lora_dtype, layout.page_bytes / 1024)
    tiers = {"host": plan.num_host_pages, f"device ({device})": plan.num_device_pages}
    if device.type == "cpu":
        tiers = {"host and device": plan.num_host_pages}  # They are the same pages.
    if config.lora.lora_cache_dir is not None:
        tiers["disk"] = _disk_pages(config, layout)
    for tier, num_pages in tiers.items():
        fits = ", ".join(
            f"{num_pages // adapter_pages(layout, rank)} of rank {rank}"
            for rank in (8, 16, 64)
            if rank <= layout.max_rank
        )
        largest = _largest_rank(partial(whole_pages, layout), num_pages, layout.max_rank)
        _logger.info(
            "%s tier: %.2f GiB, adapters on all linear layers that fit: %s; the largest that fits with embeddings and "
            "head: %s",
            tier,
            num_pages * layout.page_bytes / _GIB,
            fits,
            f"one of rank {largest}" if largest else "none",
        )
        if (needed := adapter_pages(layout, layout.max_rank, is_dora=True)) > num_pages:
            _logger.warning(
                "%s tier: an adapter of max_lora_rank %d on all linear layers takes %.2f GiB and is refused; the "
                "largest that fits has rank %d",
                tier,
                layout.max_rank,
                needed * layout.page_bytes / _GIB,
                _largest_rank(partial(adapter_pages, layout), num_pages, layout.max_rank),
            )


def _largest_rank(pages_of: Callable[[int], int], num_pages: int, max_rank: int) -> int:
    """The largest rank whose adapter some pages hold; 0 for none. pages_of: an adapter of a rank takes so many."""
    return bisect_right(range(1, max_rank + 1), num_pages, key=pages_of)
