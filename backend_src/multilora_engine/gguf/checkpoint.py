"""`prepare_gguf`: a GGUF file as the directory of a checkpoint, which all parts of the server read."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from multilora_engine.errors import ConfigError
from multilora_engine.gguf.model_fields import read_model_fields
from multilora_engine.gguf.tokenizer import json_text, read_gguf_tokenizer
from multilora_engine.working_directory import working_directory
from multilora_wire.checkpoint_directory import CONFIG_FILE, gguf_link
from multilora_wire.gguf.checkpoint import open_gguf
from multilora_wire.gguf.file import GGUFFile
from multilora_wire.tensor_file import FileBytes, TensorFileError

_FORM = "2"
"""Raised whenever the files of a directory would be others for the same GGUF file."""

_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_MAX_ROPE_FACTORS = 1 << 16


def prepare_gguf(file: Path) -> Path:
    """The directory of the checkpoint that a GGUF file is, or the first of several files of one model.

    It has config.json, the tokenizer's files, and links to the file or files, whose weights are not copied. It lies in
    the user's cache, and is made once for each model. Raises ConfigError, which names file, key or tensor.
    """
    files = split_files(file)
    first = _open(files[0])
    if first.metadata.get("split.count", 1) != len(files) or first.metadata.get("split.no", 0) != 0:
        raise ConfigError(
            f"{files[0]} is file {first.metadata.get('split.no', 0)} of {first.metadata.get('split.count', 1)}, "
            f"and by its name the first of {len(files)}"
        )
    stem = match[1] if (match := _SPLIT.fullmatch(files[0].name)) else files[0].stem
    directory = _cache_directory() / _digest(files) / stem
    try:
        if (directory / CONFIG_FILE).is_file():
            return directory
        with working_directory(directory, waits=True) as work:
            if not (directory / CONFIG_FILE).is_file():
                _write(work, files, first)
                work.rename(directory)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error}; set XDG_CACHE_HOME to a folder that can be") from error
    return directory


def split_files(file: Path) -> list[Path]:
    """All files of a model that is split into several, by the name of any of them. Raises ConfigError."""
    found = _SPLIT.fullmatch(file.name)
    if found is None:
        return [file.absolute()]
    count = int(found[3])
    files = [file.absolute().with_name(f"{found[1]}-{index:05}-of-{found[3]}.gguf") for index in range(1, count + 1)]
    if missing := [each.name for each in files if not each.is_file()]:
        raise ConfigError(f"{file} is one of {count} files; {missing[0] if missing else 'none'} is missing beside it")
    return files


def _open(file: Path) -> GGUFFile:
    try:
        return open_gguf(file)
    except TensorFileError as error:
        raise ConfigError(str(error)) from error


def _write(directory: Path, files: Sequence[Path], first: GGUFFile) -> None:
    tensors = dict(first.tensors)
    file_of = dict.fromkeys(tensors, files[0])
    for file in files[1:]:
        others = _open(file).tensors
        if twice := others.keys() & tensors.keys():
            raise ConfigError(f"{file}: tensor {min(twice)} is in another file of this model, too")
        file_of |= dict.fromkeys(others, file)
        tensors |= others

    def factors(name: str) -> list[float]:
        place = tensors[name]
        if place.dtype != "F32" or len(place.shape) != 1 or place.shape[0] > _MAX_ROPE_FACTORS:
            raise ConfigError(f"tensor {name} is {place.dtype} {list(place.shape)}, and a vector of F32 is expected")
        with FileBytes(file_of[name]) as source:
            return [float(value) for value in np.frombuffer(source.read(place.start, place.stop), "<f4")]

    try:
        fields = read_model_fields(GGUFFile(first.metadata, tensors), factors)
        tokenizer = read_gguf_tokenizer(first.metadata, fields["vocab_size"])
    except ConfigError as error:
        raise ConfigError(f"{files[0]}: {error}") from error
    fields |= {**tokenizer.ids, "quantization_config": {"quant_method": "gguf"}}
    (directory / CONFIG_FILE).write_text(json_text(fields), encoding="utf-8")
    (directory / "generation_config.json").write_text(json_text({"eos_token_id": list(tokenizer.end_token_ids)}))
    (directory / "tokenizer.json").write_text(tokenizer.tokenizer, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json_text(tokenizer.config), encoding="utf-8")
    for name, template in tokenizer.templates.items():
        target = (
            directory / "additional_chat_templates" / f"{name}.jinja" if name else directory / "chat_template.jinja"
        )
        target.parent.mkdir(exist_ok=True)
        target.write_text(template, encoding="utf-8")
    for index, file in enumerate(files):
        (directory / gguf_link(index, len(files))).symlink_to(file)


def _digest(files: Sequence[Path]) -> str:
    """Of the files' places and of the state in which they are."""
    digest = hashlib.sha256(_FORM.encode())
    for file in files:
        try:
            stat = file.stat()
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error}") from error
        digest.update(f"\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multilora" / "gguf"
