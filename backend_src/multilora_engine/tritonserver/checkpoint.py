"""`--model`: a checkpoint's directory, a GGUF file, or the id of a checkpoint on a Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from multilora_engine.errors import ConfigError
from multilora_engine.gguf.checkpoint import prepare_gguf, split_files
from multilora_wire.checkpoint_directory import is_gguf, why_no_checkpoint

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja"]
_UNWANTED_FILES = ["*/*"]
"""Sub-folders hold the same weights again in other formats."""


def resolve_checkpoint(model: str) -> Path:
    """The directory of `model`. A hub id is downloaded first, with progress bars. Raises ConfigError.

    For a GGUF file, or a directory that has nothing else of a model, a directory is made.
    """
    directory = Path(model).expanduser()
    if not directory.exists() and _HUB_ID.fullmatch(model):
        directory = _download(model)
    if (file := _gguf_file(directory)) is not None:
        directory = prepare_gguf(file)
    check_checkpoint(directory)
    return directory.absolute()


def check_stub_opens(path: str) -> None:
    """Raises ConfigError for a path that the processes of Triton's Python backend cannot open.

    Their file names are ASCII, whatever the locale says.
    """
    if not path.isascii():
        raise ConfigError(
            f"{path}: Triton's Python backend opens only paths of ASCII characters; make a link to it, and give that"
        )


def check_checkpoint(directory: Path) -> None:
    """Raises ConfigError unless `directory` looks like a Hugging Face checkpoint."""
    if reason := why_no_checkpoint(directory):
        raise ConfigError(reason if directory.exists() else f"{reason}, or a hub id (owner/name)")


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` means, or the first of several that are one model; None for another checkpoint."""
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    files = sorted(path.glob("*.gguf"))
    if not files or any(path.glob("*.safetensors")) or is_gguf(path):
        return None
    if len({file.name for file in split_files(files[0])} ^ {file.name for file in files}):
        raise ConfigError(
            f"{path} has {len(files)} GGUF files of different models, such as {files[0].name} and {files[-1].name}; "
            "give the path of one"
        )
    return files[0]


def _download(hub_id: str) -> Path:
    # Imported here because it takes a second, and most models are directories.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_WANTED_FILES, ignore_patterns=_UNWANTED_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{hub_id} is no directory here, and downloading it failed: {reason}; give a directory, or set HF_ENDPOINT "
            "to a hub that this machine reaches, or HF_TOKEN where the model is not public"
        ) from None
