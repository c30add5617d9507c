"""Why a path is no directory of a checkpoint, with a way out, wherever a checkpoint is named."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

CONFIG_FILE = "config.json"
_ADAPTER_FILE = "adapter_config.json"

FROM_GGUF = (
    "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; d, f, o = {directory}, {file}, "
    '"checkpoint"; m = M.from_pretrained(d, gguf_file=f, dtype="float32"); del m.config.quantization_config; '
    "m.hf_quantizer = None; m.save_pretrained(o); T.from_pretrained(d, gguf_file=f).save_pretrained(o)"
)
"""Python that writes a GGUF file's model as a checkpoint of floats. transformers refuses to save a model that remembers
that it was quantised."""


def why_no_checkpoint(path: Path) -> str | None:
    """Why `path` is not the directory of a Hugging Face checkpoint; None when it has a config.json."""
    if (path / CONFIG_FILE).is_file():
        return None
    if gguf := _gguf_file(path):
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
    """What to do with a GGUF file."""
    code = FROM_GGUF.format(directory=json.dumps(str(file.parent)), file=json.dumps(file.name))
    return (
        f"{file} is GGUF, which is not served; quantise the original model with `multilora quantize`, or make a "
        f"checkpoint of the file, with transformers and gguf installed: python -c {shlex.quote(code)}"
    )


def only_gguf(path: Path) -> str | None:
    """The advice for a directory of a checkpoint that has a GGUF file; None when it has none."""
    gguf = _gguf_file(path)
    return gguf_advice(gguf) if gguf else None


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the first that it has."""
    return path if path.suffix == ".gguf" else min(path.glob("*.gguf"), default=None)
