"""`BaseModel`: the model that an engine loads first, and the parts that follow from it and from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from multilora_engine.config import EngineConfig, idle_parameters
from multilora_engine.engine.build import (
    capture_graphs,
    capture_pieces,
    choose_device,
    choose_dtype,
    choose_kv_cache_dtype,
    choose_weight_dtype,
    dtype_name,
    may_have_graphs,
    tell_of_no_gpu,
)
from multilora_engine.engine.memory import (
    NO_STEP_BYTES,
    MemoryPlan,
    StepBytes,
    available_memory,
    give_back_freed_memory,
    plan_memory,
    wait_for_freed_memory,
)
from multilora_engine.engine_info import CallLimits, ClientPolicy, EngineInfo, read_version
from multilora_engine.errors import ConfigError
from multilora_engine.execution.cuda_graphs import graph_sizes
from multilora_engine.execution.model_runner import ROWS_AT_ONCE
from multilora_engine.execution.piecewise_graphs import CudaPieces, piece_sizes
from multilora_engine.execution.self_test import check_operators, faults_named, launch_operators
from multilora_engine.execution.step_memory import graph_memory, kept_growth, peak_growth, step_memory, trial_cache
from multilora_engine.execution.warm_up import compile_kernels, compute_steps
from multilora_engine.lora.device_tier import TableRows
from multilora_engine.models.checkpoint import weights_fingerprint
from multilora_engine.models.loader import load_model
from multilora_engine.models.model import Model
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.quantization.format import sites_ruled_out
from multilora_engine.models.registry import begin_model_config
from multilora_engine.models.weights import Placement
from multilora_engine.sampling.sampler import WORK_BYTES_PER_LOGIT
from multilora_engine.sampling.token_counts import TokenCounts
from multilora_engine.text.tokenizer import Tokenizer
from multilora_kernels import LoRATables, huge_pages, load_cpu_kernels
from multilora_kernels.control_groups import usable_processors
from multilora_kernels.interpreter import has_gpu_operators
from multilora_wire.layout import AdapterLayout, adapter_layout
from multilora_wire.sites import ModelSites

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BaseModel:
    """The model with its weights, its tokenizer, the layout of adapters for it, and the plan of the memory left.

    dtype: of the model's computations.
    """

    model: Model
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    tokenizer: Tokenizer
    tokenizer_path: Path
    layout: AdapterLayout
    plan: MemoryPlan


def load_base_model(config: EngineConfig, on_progress: Callable[[int, int], None] | None) -> BaseModel:
    """Load weights and tokenizer. on_progress: called with (tensors loaded, tensors in all).

    Raises ConfigError, and OperatorFault on a GPU that computes wrongly.
    """
    device = choose_device(config)
    tell_of_no_gpu(config, device)
    wait_for_config = begin_model_config(config.model_path, config.model_implementation)
    if device.type == "cpu":
        if idle := idle_parameters(config):
            _logger.warning("%s: of a GPU's memory, and the CPU serves: without effect", " and ".join(idle))
        _prepare_cpu(config)
    else:
        # A restart comes before the driver has taken back what the dead process had.
        wait_for_freed_memory(partial(torch.cuda.mem_get_info, device))
    tokenizer_path = config.tokenizer_path or config.model_path
    tokenizer = Tokenizer(tokenizer_path)
    model_config = wait_for_config()
    _check_length(config.max_model_len, model_config)
    _check_graphs(config, model_config)
    sites = restricted_sites(model_config.sites, config.lora.target_modules)
    dtype = choose_dtype(config.dtype, model_config, device)
    kv_dtype = choose_kv_cache_dtype(config, model_config, dtype, device)
    placement = Placement(dtype, choose_weight_dtype(config, dtype, device), device)
    model = load_model(config.model_path, placement, on_progress, model_config)
    give_back_freed_memory()  # Of tensors as the checkpoint has them.
    for kind, num_bytes in model.weight_bytes.items():
        _logger.info("weights: %.2f GiB, stored as %s", num_bytes / (1 << 30), kind)
    lora_dtype = dtype_name(dtype) if config.lora.lora_dtype == "auto" else config.lora.lora_dtype
    ruled_out = sites_ruled_out(config.model_path, sites)
    fingerprint = weights_fingerprint(config.model_path)
    layout = adapter_layout(sites, config.lora.max_lora_rank, lora_dtype, ruled_out, fingerprint)
    if layout.code_bits:
        load_cpu_kernels()  # The CPU's kernels quantise adapters as they arrive, for a GPU too.
    steps = NO_STEP_BYTES
    if has_gpu_operators(device):
        tables = TableRows(layout, torch.zeros(1, layout.page_bytes, dtype=torch.uint8, device=device), count=1).tables
        if device.type == "cuda":
            _compile_kernels(model, config, tables, kv_dtype)
        # Before any step, so that an operator that fails is named.
        check_operators(model, tables, kv_dtype, config)
        if device.type == "cuda":
            steps = _measure_steps(model, config, tables, kv_dtype)
            _logger.info("kept free for steps: %s", steps)
            del tables
            # Memory that the allocator keeps for itself would not count as free.
            torch.cuda.empty_cache()
    plan = plan_memory(config, model_config, layout, kv_dtype, device, steps)
    layout = replace(layout, max_pages=min(plan.num_host_pages, plan.num_device_pages))
    model.limit_length(plan.max_model_len)
    return BaseModel(model, model_config, dtype, device, tokenizer, tokenizer_path, layout, plan)


def _check_length(max_model_len: int, model: ModelConfig) -> None:
    """Raises ConfigError for sequences longer than a table of positions, such as BART's, has rows for."""
    has_table = model.source is not None and model.source.max_tokens is not None
    if has_table and max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_model_len}, and the model has {model.max_position_embeddings} positions; write at "
            "most these"
        )


def _check_graphs(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for CUDA graphs that are demanded of a model whose steps are never captured."""
    if config.enable_cuda_graphs is True and model.source is not None:
        raise ConfigError(
            "parameter enable_cuda_graphs=true: the steps of a model with an encoder are not captured; write auto or "
            "false"
        )


def restricted_sites(sites: ModelSites, names: Collection[str]) -> ModelSites:
    """names: `lora_target_modules`. Raises ConfigError for a module that the model has not."""
    if missing := [name for name in names if name not in sites.target_names]:
        raise ConfigError(
            f"parameter lora_target_modules={','.join(names)}: the model has no {', '.join(missing)}; write some of "
            f"{', '.join(sites.target_names)}"
        )
    restricted = sites.restricted_to(names) if names else sites
    if not restricted.modules:
        raise ConfigError(
            f"parameter lora_target_modules={','.join(names)} leaves no module of a layer; write some of "
            f"{', '.join(sites.module_names.values())}, too"
        )
    return restricted


def describe_engine(config: EngineConfig, base: BaseModel) -> EngineInfo:
    """The facts about an engine that its fronts need."""
    source = base.config.source
    return EngineInfo(
        model_path=str(config.model_path),
        tokenizer_path=str(base.tokenizer_path),
        max_model_len=base.plan.max_model_len,
        vocab_size=base.config.vocab_size,
        end_token_ids=base.config.end_token_ids,
        add_special_tokens=config.add_special_tokens,
        exclude_input_in_output=config.exclude_input_in_output,
        special_tokens_in_messages=config.special_tokens_in_messages,
        limits=CallLimits(),
        max_adapter_bytes=int(config.lora.lora_max_adapter_bytes),
        adapter_layout=base.layout,
        kv_cache_tokens=base.plan.num_blocks * config.block_size,
        device=str(base.device),
        dtype=dtype_name(base.dtype),
        kv_cache_dtype=dtype_name(base.plan.kv_dtype),
        model_implementation=base.config.implementation,
        source=source and replace(source, max_tokens=source.longest(config.max_num_encoder_tokens)),
        version=read_version(),
        clients=ClientPolicy.of(config),
    )


def _compile_kernels(model: Model, config: EngineConfig, tables: LoRATables, kv_dtype: torch.dtype) -> None:
    """Those of steps and of the comparison with the reference, for a GPU."""
    max_len = config.max_model_len or model.config.max_position_embeddings
    model.limit_length(max_len)
    sizes = (config.max_num_batched_tokens, config.max_num_seqs, max_len)
    kv_cache = trial_cache(model, config.block_size, kv_dtype, tables.rank.device)

    def launch() -> None:
        compute_steps(model, kv_cache, tables, *sizes, config.block_size, config.max_num_encoder_tokens)
        launch_operators(model, tables, kv_dtype, config)

    compile_kernels(launch, tables.rank.device, available_memory())


def _measure_steps(model: Model, config: EngineConfig, tables: LoRATables, kv_dtype: torch.dtype) -> StepBytes:
    """Of a GPU, whose memory only the weights have yet. tables: of one adapter."""
    device, max_len = tables.rank.device, config.max_model_len or model.config.max_position_embeddings
    max_num_seqs, vocab_size = config.max_num_seqs, model.config.vocab_size
    model.limit_length(max_len)
    with faults_named("a trial of the largest steps", device):
        step = step_memory(model, config, kv_dtype, tables, max_len, peak_growth(device))
    table_bytes = sum(
        table.nbytes for table in (tables.rank, tables.a_offset, tables.b_offset, tables.magnitude_offset)
    )
    return StepBytes(
        step,
        _measure_graphs(model, config, tables, kv_dtype, max_len)
        if may_have_graphs(config, device, model.config)
        else 0,
        max(max_num_seqs, ROWS_AT_ONCE) * vocab_size * WORK_BYTES_PER_LOGIT,
        TokenCounts.num_bytes(max_num_seqs, vocab_size) + config.lora.max_loras * table_bytes,
    )


def _measure_graphs(model: Model, config: EngineConfig, tables: LoRATables, kv_dtype: torch.dtype, max_len: int) -> int:
    """Of a GPU: bytes that captured steps keep, and the block of the KV cache that is theirs alone.

    Graphs that cannot be captured take nothing: they will not be captured later, either.
    """
    device = tables.rank.device
    kv_cache = trial_cache(model, config.block_size, kv_dtype, device)
    plan = MemoryPlan(0, kv_dtype, 0, 0, max_len)

    def decodes(sizes: list[int]) -> object:
        return capture_graphs(model, kv_cache, config, plan, tables, None, sizes=sizes)

    def pieces(sizes: list[int]) -> object:
        return capture_pieces(
            model, kv_cache, config, plan, tables, CudaPieces(torch.cuda.graph_pool_handle()), None, sizes
        )

    measure = kept_growth(device)
    num_bytes = kv_cache.num_bytes + graph_memory(decodes, graph_sizes(config.max_num_seqs), measure)
    if model.config.general is None:
        num_bytes += graph_memory(pieces, piece_sizes(config.max_num_batched_tokens), measure)
    return num_bytes


def _prepare_cpu(config: EngineConfig) -> None:
    torch.set_num_threads(config.num_threads or usable_processors())
    load_cpu_kernels()
    if huge_pages.are_switched_off():
        _logger.warning(
            "this machine gives no huge pages, which makes steps on a CPU about a third slower: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
