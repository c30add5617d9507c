"""GGUF, the format of llama.cpp, which is refused with a way out wherever a checkpoint is named."""

from __future__ import annotations

from pathlib import Path

GGUF_ADVICE = (
    "GGUF is not served; quantise the original model with llm-compressor, or load it with transformers "
    "(from_pretrained's gguf_file) and save it again"
)


def gguf_files(path: Path) -> list[str]:
    """The names of the GGUF files of a directory, or of the one file that `path` is."""
    return [path.name] if path.suffix == ".gguf" else sorted(file.name for file in path.glob("*.gguf"))
