"""`GGUFWeights`: the tensors of GGUF files as those of a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from multilora_engine.errors import ConfigError
from multilora_wire.gguf.checkpoint import read_tensors
from multilora_wire.quantized.scheme import StoredTensor
from multilora_wire.tensor_file import TensorFileError

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFWeights:
    """tensors: of all files. A quantised matrix `NAME.weight` of type T is `NAME.weight.T`, the bytes of its rows."""

    def __init__(self, path: Path) -> None:
        """path: the directory that `prepare_gguf` made. Raises ConfigError, which names the file."""
        try:
            found = read_tensors(path)
        except TensorFileError as error:
            raise ConfigError(str(error)) from error
        self._stored = {
            f"{name}.{tensor.place.dtype}" if tensor.kind.is_quantized else name: tensor
            for name, tensor in found.items()
        }
        self.tensors = {
            name: StoredTensor("U8", (tensor.place.shape[0], tensor.row_bytes))
            if tensor.kind.is_quantized
            else StoredTensor(tensor.place.dtype, tensor.place.shape)
            for name, tensor in self._stored.items()
        }

    def file_of(self, name: str) -> Path:
        """The file that has a tensor."""
        return self._stored[name].file

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises ConfigError."""
        stored = self._stored[name]
        try:
            rows = torch.from_numpy(stored.rows())
        except (OSError, TensorFileError) as error:
            raise ConfigError(f"cannot read {stored.file}: {error}") from error
        if stored.kind.is_quantized:
            return rows
        values = rows.view(_FLOATS[stored.place.dtype]).reshape(stored.place.shape)
        return values.float() - 1 if stored.has_one_added else values
