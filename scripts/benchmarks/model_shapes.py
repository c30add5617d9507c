"""Shapes of models whose adapters are measured."""

from __future__ import annotations

from benchmarks.lora_workloads import llama

DEFAULT_MODEL = llama("135M", hidden=576, kv=192, ffn=1536, num_layers=30)
ONE_BILLION = llama("1B", hidden=2048, kv=512, ffn=8192, num_layers=16)
EIGHT_BILLION = llama("8B", hidden=4096, kv=1024, ffn=14336, num_layers=1)

VOCAB_SIZE = 128256
"""Of the models of one and of eight billion parameters."""

BLOCK_SIZE = 16
"""Tokens of a block of the KV cache."""
