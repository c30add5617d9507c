"""The self-test of the GPU operators in a model's own shapes, once at start.

A device that computes otherwise than the tested ones is refused, and gives no client wrong tokens.
"""

from __future__ import annotations

import logging
import time

from multilora_engine.models.model import Model
from multilora_kernels import LoRATables
from multilora_kernels.self_test import OperatorShapes, device_name, self_test

_logger = logging.getLogger(__name__)


def check_operators(model: Model, tables: LoRATables, block_size: int) -> None:
    """Compare the operators with the reference on the tables' device. Raises OperatorFault."""
    device, started = tables.arena.device, time.monotonic()
    checked = self_test(operator_shapes(model, tables, block_size), device)
    seconds = time.monotonic() - started
    _logger.info("self-test on %s: %d comparisons passed in %.1f s", device_name(device), len(checked), seconds)


def operator_shapes(model: Model, tables: LoRATables, block_size: int) -> OperatorShapes:
    """The shapes of a model's operators: each width of a linear once, and queries, keys and values as one."""
    config = model.config
    widths = {(site.in_size, (site.out_size,)) for site in model.adapter_sites.sites}
    coded = [switch.codes for switch in model.weight_switches]
    fused = (config.hidden_size, (config.q_size, config.kv_size, config.kv_size))
    return OperatorShapes(
        hidden_size=config.hidden_size,
        mlp_size=config.intermediate_size,
        linears=(fused, *sorted(widths)),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        max_rank=tables.max_rank,
        dtype=model.dtype,
        lora_dtype=tables.arena.dtype,
        vocab_size=config.vocab_size,
        code_types=tuple({(codes.code_type, codes.group_size): None for codes in coded}),
    )
