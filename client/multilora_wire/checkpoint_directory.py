"""Checkpoint directories: why a path is none, wherever a checkpoint is named; the links of a GGUF file's directory."""

from __future__ import annotations

from pathlib import Path

CONFIG_FILE = "config.json"
_ADAPTER_FILE = "adapter_config.json"
_LINKS = "model*.gguf"


def why_no_checkpoint(path: Path) -> str | None:
    """Why `path` is not the directory of a Hugging Face checkpoint; None when it has a config.json."""
    if (path / CONFIG_FILE).is_file():
        return None
    if gguf := find_gguf(path):
        return gguf_advice(gguf)
    if (path / _ADAPTER_FILE).is_file():
        return (
            f"{path} is an adapter ({_ADAPTER_FILE}); name its base model's checkpoint here, and give the adapter with "
            "requests: multilora generate --adapter DIR"
        )
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        return f"{path} {what}; give the directory of a Hugging Face checkpoint"
    return f"{path} has no {CONFIG_FILE}; give the directory of a Hugging Face checkpoint"


def gguf_advice(file: Path) -> str:
    """What to do with a GGUF file where a directory is expected."""
    return f"{file} is GGUF, which multilora-serve --model serves; here give the directory of a Hugging Face checkpoint"


def only_gguf(path: Path) -> str | None:
    """The advice for a directory of a checkpoint that has a GGUF file; None when it has none."""
    gguf = find_gguf(path)
    return gguf_advice(gguf) if gguf else None


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the first that it has."""
    return path if path.suffix == ".gguf" else min(path.glob("*.gguf"), default=None)


def gguf_link(index: int, count: int) -> str:
    """The name, in the directory that is made for GGUF files, of the link to one of them."""
    return "model.gguf" if count == 1 else f"model-{index + 1:05}-of-{count:05}.gguf"


def is_gguf(directory: Path) -> bool:
    """Whether a directory was made for GGUF files."""
    links = gguf_links(directory)
    return bool(links) and links[0].name == gguf_link(0, len(links)) and links[0].is_symlink()


def gguf_links(directory: Path) -> list[Path]:
    """The links of such a directory, in the order of their files."""
    return sorted(directory.glob(_LINKS))
