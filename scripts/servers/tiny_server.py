"""Runs a real server over a model of a few thousand random parameters, to try all parts but the model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.models.registry import read_model_config
from multilora_engine.quickstart.default_model import ensure_default_checkpoint
from multilora_engine.tritonserver import ServerProcess
from multilora_engine.tritonserver.upstream_models import UpstreamModels
from servers.started_server import started_server

_PARAMETERS = {
    "num_threads": "1",
    "kv_cache_memory_bytes": "16MiB",
    "max_num_seqs": "16",
    "lora_cache_host_memory_bytes": "32MiB",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@contextmanager
def tiny_server(
    upstream_models: UpstreamModels = UpstreamModels.NONE, **overrides: str
) -> Iterator[tuple[ServerProcess, Path]]:
    """A server that is ready, on free ports, and its model's directory. overrides: of the engine's parameters."""
    with tempfile.TemporaryDirectory() as directory:
        model = save_tiny_model(Path(directory))
        parameters = {**_PARAMETERS, **overrides}
        with started_server(model, upstream_models=upstream_models, overrides=parameters) as server:
            yield server, model


def save_tiny_model(path: Path) -> Path:
    """A Llama of a few thousand random parameters for the default model's tokenizer. Context 512, no end token."""
    default = ensure_default_checkpoint()
    save_tiny_llama(path, vocab_size=read_model_config(default).vocab_size)
    for name in _TOKENIZER_FILES:
        if (default / name).exists():
            shutil.copy(default / name, path)
    return path
