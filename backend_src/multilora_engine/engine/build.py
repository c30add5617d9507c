"""Builds the parts of an `Engine` from its configuration."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache
from multilora_engine.config import EngineConfig
from multilora_engine.engine.memory import MemoryPlan
from multilora_engine.errors import ConfigError
from multilora_engine.execution.cuda_graphs import DecodeGraphs, DecodeInputs, Forward, capture_decode, graph_sizes
from multilora_engine.execution.device_probe import DeviceProbe, is_device_dead
from multilora_engine.execution.graph_check import GraphCheck, GraphFault
from multilora_engine.execution.model_runner import ModelRunner
from multilora_engine.execution.piecewise_graphs import CudaPieces, Pieces, PiecewiseGraphs, piece_sizes
from multilora_engine.execution.warm_up import compute_steps
from multilora_engine.lora.adapter_events import EventLog
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.format import TORCH_DTYPES
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.layout import AdapterTraits
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.models.loader import stored_dtype
from multilora_engine.models.model import Model, only_group
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.out_of_memory import is_out_of_memory
from multilora_engine.sampling.token_counts import TokenCounts
from multilora_kernels import HugePages, LoRATables, MemoryAhead
from multilora_kernels.interpreter import has_gpu_operators
from multilora_kernels.kv_rows import SCALE_BYTES
from multilora_wire.adapter_event import AdapterEvent
from multilora_wire.layout import AdapterLayout
from multilora_wire.pieces import CODE_BITS

if TYPE_CHECKING:
    from multilora_engine.lora.sources.fetcher import AdapterFetcher

_logger = logging.getLogger(__name__)

_Graphs = TypeVar("_Graphs")

CaptureDecode = Callable[[Forward, DecodeInputs, list[int], int, torch.device], DecodeGraphs]
"""As `capture_decode`."""


def choose_device(config: EngineConfig) -> torch.device:
    """Raises ConfigError for a GPU that is not there."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("parameter device=cuda: torch finds no GPU; write device=auto or device=cpu")
    return torch.device("cuda" if has_gpu and config.device != "cpu" else "cpu")


_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def tell_of_no_gpu(config: EngineConfig, device: torch.device, driver_file: Path = _DRIVER_FILE) -> None:
    """Log why `device=auto` has chosen the CPU, if it has: as a warning where the machine has a driver, and so a GPU.

    driver_file: of the kernel's module, which is there in containers without access to GPUs, too.
    """
    if config.device != "auto" or device.type != "cpu":
        return
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
    if not driver_file.is_file():
        _logger.info("device=auto: no NVIDIA driver is here, the CPU serves (torch %s for %s)", torch.__version__, cuda)
        return
    try:
        torch.cuda.init()
        reason = "torch finds no GPU"
    except (RuntimeError, AssertionError) as error:
        reason = str(error)
    version = re.search(r"[0-9]+(\.[0-9]+)+", driver_file.read_text())
    _logger.warning(
        "device=auto: the CPU serves, though this machine has the NVIDIA driver %s, since torch %s for %s says: %s",
        *(version[0] if version else "of an unknown version", torch.__version__, cuda, reason),
    )


def choose_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        # A CPU's steps wait for weights rather than for exact products, and the weights are stored in bfloat16 all the
        # same.
        name = "float32" if device.type == "cpu" else model.dtype
    return TORCH_DTYPES[name]


def choose_weight_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The format that stores the weights. Raises ConfigError where the device has no kernels for it."""
    may_differ = device.type == "cpu" and dtype == torch.float32
    if config.weight_dtype == "auto":
        return stored_dtype(config.model_path) if may_differ else dtype
    if TORCH_DTYPES[config.weight_dtype] != dtype and not may_differ:
        raise ConfigError(
            f"parameter weight_dtype={config.weight_dtype}: on {device.type}, computing in {dtype_name(dtype)}, "
            f"weights are stored as {dtype_name(dtype)}; write weight_dtype=auto, or change dtype"
        )
    return TORCH_DTYPES[config.weight_dtype]


_CODED_CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def choose_kv_cache_dtype(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """The type of keys and values in the cache. Raises ConfigError for one that the model or device cannot have."""
    if config.kv_cache_dtype == "auto":
        return dtype
    coded = _CODED_CACHE_DTYPES.get(config.kv_cache_dtype)
    chosen = coded or TORCH_DTYPES[config.kv_cache_dtype]
    if coded is None and chosen != dtype and dtype != torch.float32:
        raise ConfigError(
            f"parameter kv_cache_dtype={config.kv_cache_dtype}: keys and values are computed in {dtype_name(dtype)}, "
            f"so {config.kv_cache_dtype} would store them no better; write kv_cache_dtype=auto or int8, or change dtype"
        )
    if coded and model.head_dim % SCALE_BYTES:
        raise ConfigError(
            f"parameter kv_cache_dtype={config.kv_cache_dtype} takes heads of a multiple of {SCALE_BYTES} elements, "
            f"and the model's have {model.head_dim}; write kv_cache_dtype=auto"
        )
    return chosen


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def build_lora_manager(
    config: EngineConfig,
    layout: AdapterLayout,
    plan: MemoryPlan,
    probe: DeviceProbe,
    events: EventLog[AdapterEvent],
    check_traits: Callable[[AdapterTraits], None],
) -> LoRAManager:
    device = probe.device
    host = HostTier(plan.num_host_pages, layout.page_bytes, pin_memory=device.type == "cuda")
    # Where GPU operators compute on a CPU, codes have an order of their own, which the host's pages do not have.
    is_shared = device.type == "cpu" and not (layout.lora_dtype in CODE_BITS and has_gpu_operators(device))
    device_pool = host.pool if is_shared else PagePool(plan.num_device_pages, layout.page_bytes, device)
    tier = DeviceTier(
        layout,
        host.pool,
        device_pool,
        config.lora.max_loras,
        events.append,
        is_device_dead=probe.is_dead,
    )
    disk = None
    if config.lora.lora_cache_dir is not None:
        disk = DiskTier(
            config.lora.lora_cache_dir, int(config.lora.lora_cache_disk_bytes), layout, on_event=events.append
        )
    return LoRAManager(host, tier, config.lora.lora_on_conflict, events.append, disk, check_traits)


def build_fetcher(config: EngineConfig, layout: AdapterLayout, uses: UseReader) -> AdapterFetcher | None:
    """The fetcher that asks the sources of adapters; None without sources. Raises ConfigError."""
    if not config.lora.lora_sources:
        return None
    try:
        # Here only: the converter is in the client's package, which an engine without sources does not need.
        from multilora_engine.lora.sources.fetcher import AdapterFetcher
        from multilora_engine.lora.sources.registry import build_sources
    except ImportError as error:
        raise ConfigError(f"lora_sources needs a package that is missing: {error}; install multilora-client") from None
    sources = build_sources(config.lora.lora_sources)
    return AdapterFetcher(sources, layout, config.model_path, uses=uses)


def build_model_runner(
    model: Model,
    config: EngineConfig,
    plan: MemoryPlan,
    device: torch.device,
    loras: DeviceTier,
) -> ModelRunner:
    """Raises GraphFault."""
    has_graphs = may_have_graphs(config, device, model.config)
    group = only_group(model.kv_groups)
    num_slots = (plan.num_blocks + has_graphs) * config.block_size
    # A GPU takes its memory at once, and a CPU's `MemoryAhead` as it is used.
    zeros = HugePages().zeros if device.type == "cpu" else None
    kv_cache = KVCache(*(group.cache(num_slots, plan.kv_dtype, device, zeros) for _ in range(2)))
    if device.type == "cuda":
        max_sizes = (config.max_num_batched_tokens, config.max_num_seqs, plan.max_model_len)
        started = time.monotonic()
        sizes = (*max_sizes, config.block_size, config.max_num_encoder_tokens)
        num_steps = compute_steps(model, kv_cache, loras.tables, *sizes)
        seconds = time.monotonic() - started
        _logger.info("%d kinds of steps of up to %d tokens computed once in %.1f s", num_steps, max_sizes[0], seconds)
    graphs = pieces = None
    if has_graphs:
        check = GraphCheck(model, kv_cache, loras, plan.num_blocks, config.block_size, plan.max_model_len)
        graphs = capture_graphs(model, kv_cache, config, plan, loras.tables, check)
        if model.config.general is None:
            pool = torch.cuda.graph_pool_handle()
            pieces = capture_pieces(model, kv_cache, config, plan, loras.tables, CudaPieces(pool), check)
    memory = None if has_gpu_operators(device) else MemoryAhead(*kv_cache.rows)
    counts = None
    if device.type == "cuda" or config.enable_async_scheduling is True:
        counts = TokenCounts(config.max_num_seqs, model.config.vocab_size, device)
    return ModelRunner(model, kv_cache, config.block_size, loras, graphs, pieces, memory, counts)


def may_have_graphs(config: EngineConfig, device: torch.device, model: ModelConfig) -> bool:
    """Whether steps are to be captured as CUDA graphs. The steps of encoder-decoder models are not."""
    return config.enable_cuda_graphs is not False and device.type == "cuda" and model.source is None


def capture_graphs(
    model: Model,
    kv_cache: KVCache,
    config: EngineConfig,
    plan: MemoryPlan,
    tables: LoRATables,
    check: GraphCheck | None,
    capture: CaptureDecode = capture_decode,
    sizes: list[int] | None = None,
) -> DecodeGraphs | None:
    """The cache has one block more than are planned, for rows of padding.

    check: None for a trial, whose graphs serve nobody. sizes: in place of all.

    None if the graphs fail here, and the configuration leaves the choice. Raises ConfigError if memory runs out, else
    GraphFault, or the device's error, if the configuration asks for graphs, and the error that a device died of.
    """
    sizes = sizes or graph_sizes(config.max_num_seqs)
    max_blocks = -(-plan.max_model_len // config.block_size)
    inputs = DecodeInputs(sizes[-1], max_blocks, config.block_size, plan.num_blocks, tables)
    vocab_size = model.config.vocab_size

    def forward(batch: ForwardBatch, out: torch.Tensor) -> torch.Tensor:
        return model.logits(model.hidden_states(batch, kv_cache), batch.logits_indices, batch.lora, out)

    def captured() -> DecodeGraphs:
        graphs = capture(forward, inputs, sizes, vocab_size, kv_cache.keys.device)
        if check is not None:
            check.check_decodes(graphs)
        return graphs

    return _unless_it_fails(captured, config, _kept_free(plan, check), "decode steps", kv_cache.keys.device)


def capture_pieces(
    model: Model,
    kv_cache: KVCache,
    config: EngineConfig,
    plan: MemoryPlan,
    tables: LoRATables,
    pieces: Pieces,
    check: GraphCheck | None,
    sizes: list[int] | None = None,
) -> PiecewiseGraphs | None:
    """Of steps with prompts; the rest as of `capture_graphs`."""
    sizes = sizes or piece_sizes(config.max_num_batched_tokens)

    def captured() -> PiecewiseGraphs:
        graphs = PiecewiseGraphs(model, kv_cache, tables, sizes, pieces)
        if check is not None:
            check.check_pieces(graphs)
        return graphs

    return _unless_it_fails(captured, config, _kept_free(plan, check), "steps with prompts", kv_cache.keys.device)


def _kept_free(plan: MemoryPlan, check: GraphCheck | None) -> int | None:
    """Bytes; None for a trial, before which nothing is planned."""
    return None if check is None else plan.steps.graphs


def _unless_it_fails(
    capture: Callable[[], _Graphs], config: EngineConfig, planned_bytes: int | None, steps: str, device: torch.device
) -> _Graphs | None:
    """planned_bytes: of the device's memory, kept free for graphs; None for a trial, before any of it is divided."""
    try:
        return capture()
    except (RuntimeError, GraphFault) as error:
        if is_device_dead(device):
            raise
        if any(map(is_out_of_memory, _with_contexts(error))):
            free, total = (num_bytes / (1 << 30) for num_bytes in torch.cuda.mem_get_info(device))
            if planned_bytes is None:
                raise ConfigError(
                    f"CUDA graphs of {steps} do not fit beside the model's weights: {free:.2f} of {total:.2f} GiB are "
                    f"free now, before the KV cache and the adapters have any; write a smaller max_num_seqs (it is "
                    f"{config.max_num_seqs}) or max_num_batched_tokens (it is {config.max_num_batched_tokens}), or "
                    "serve a smaller model"
                ) from error
            raise ConfigError(
                f"CUDA graphs of {steps} do not fit: {planned_bytes / (1 << 30):.2f} GiB were kept free for graphs, "
                f"and {free:.2f} of {total:.2f} GiB are free now; write a smaller gpu_memory_utilization (it is "
                f"{config.gpu_memory_utilization:g}), max_num_seqs or max_num_batched_tokens"
            ) from error
        if config.enable_cuda_graphs != "auto":
            raise
        _logger.warning("%s are launched kernel by kernel, which is slower: CUDA graphs failed: %s", steps, error)
        return None


def _with_contexts(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it followed: the end of a capture fails, too, after its beginning has failed."""
    while True:
        yield error
        if error.__context__ is None:
            return
        error = error.__context__
