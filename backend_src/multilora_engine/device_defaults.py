"""The values of parameters that are 0 or `auto` in the configuration, where the best depends on the device."""

from __future__ import annotations

from multilora_engine.config import EngineConfig

CPU_STEP_TOKENS = 256
"""A prompt's chunk of some hundred milliseconds."""

_GPU_STEP_TOKENS = 2048
"""Fewer tokens of prompts wait for a GPU's weights rather than for its arithmetic."""

_CPU_MAX_LORAS = 32

LEAST_HOST_TIER_BYTES = 1 << 30


def on_device(config: EngineConfig, device: str) -> EngineConfig:
    """The same with numbers for `max_num_batched_tokens` and `max_loras`, and a choice for `enable_async_scheduling`.

    A GPU's `enable_cuda_graphs` stays `auto` until they have been tried. device: "cpu", "cuda", "cuda:0" and so on.
    """
    is_gpu = device.startswith("cuda")
    num_tokens = max(config.max_num_seqs, _GPU_STEP_TOKENS if is_gpu else CPU_STEP_TOKENS)
    max_loras = config.max_num_seqs if is_gpu else _CPU_MAX_LORAS
    lora = config.lora.model_copy(update={"max_loras": config.lora.max_loras or max_loras})
    has_auto_scheduling, has_auto_graphs = (
        value == "auto" for value in (config.enable_async_scheduling, config.enable_cuda_graphs)
    )
    return config.model_copy(
        update={
            "max_num_batched_tokens": config.max_num_batched_tokens or num_tokens,
            "lora": lora,
            "enable_async_scheduling": is_gpu if has_auto_scheduling else config.enable_async_scheduling,
            "enable_cuda_graphs": False if has_auto_graphs and not is_gpu else config.enable_cuda_graphs,
        }
    )
