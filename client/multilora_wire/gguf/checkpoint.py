"""The tensors of a checkpoint directory that was made for GGUF files, by Hugging Face's names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from multilora_wire.checkpoint_directory import CONFIG_FILE, gguf_links
from multilora_wire.gguf.blocks import TYPES, BlockType, dequantize
from multilora_wire.gguf.file import GGUFFile, read_gguf
from multilora_wire.gguf.names import ARCHITECTURES, TensorNames, row_order
from multilora_wire.tensor_file import FileBytes, TensorFileError, TensorPlace

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are part of config.json."""

_VALUES_PER_TILE = 1 << 20


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file. num_heads: whose rows are exchanged, 0 for none. has_one_added: to its values."""

    file: Path
    place: TensorPlace
    num_heads: int
    has_one_added: bool

    @property
    def kind(self) -> BlockType:
        """The type of its blocks."""
        return TYPES[self.place.dtype]

    @property
    def row_bytes(self) -> int:
        """The bytes of one of its rows."""
        return (self.place.stop - self.place.start) // self.place.shape[0]

    def rows(self) -> npt.NDArray[np.uint8]:
        """All rows as stored, `[rows, row_bytes]`, in Hugging Face's order. Raises TensorFileError, OSError."""
        with FileBytes(self.file) as source:
            data = np.frombuffer(bytearray(source.read(self.place.start, self.place.stop)), np.uint8)
        rows = data.reshape(self.place.shape[0], self.row_bytes)
        return rows[row_order(len(rows), self.num_heads)] if self.num_heads else rows

    def float_tiles(self) -> Iterator[npt.NDArray[np.float32]]:
        """The values of a matrix, some rows at a time, `[rows, inputs]` float32. Raises TensorFileError, OSError."""
        rows = self.rows()
        step = max(1, _VALUES_PER_TILE // self.place.shape[-1])
        for first in range(0, len(rows), step):
            yield self._floats(rows[first : first + step])

    def _floats(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        if self.kind.is_quantized:
            return dequantize(self.kind, rows)
        if self.place.dtype == "BF16":
            return (rows.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        return rows.view("<f4" if self.place.dtype == "F32" else "<f2").astype(np.float32)


def open_gguf(file: Path) -> GGUFFile:
    """The header of a file. Raises TensorFileError, which names the file."""
    try:
        with FileBytes(file) as source:
            return read_gguf(source)
    except (OSError, TensorFileError) as error:
        raise TensorFileError(f"cannot read {file}: {error}") from error


def read_tensors(directory: Path) -> dict[str, GGUFTensor]:
    """The tensors of a directory's files by Hugging Face's names, in their order. No values are read.

    Raises TensorFileError, which names file and tensor, for a name that nobody here knows.
    """
    fields = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    found: dict[str, GGUFTensor] = {}
    names: TensorNames | None = None
    for file in gguf_links(directory):
        header = open_gguf(file)
        names = names or ARCHITECTURES[header.metadata["general.architecture"]]
        found |= _tensors(file, header.tensors, names, heads)
    return found


def _tensors(
    file: Path, places: Mapping[str, TensorPlace], names: TensorNames, heads: tuple[int, int]
) -> dict[str, GGUFTensor]:
    found: dict[str, GGUFTensor] = {}
    for place in places.values():
        if place.key in ROPE_TENSORS:
            continue
        name, shape = names.hugging_face(place.key), place.shape
        if name is None:
            raise TensorFileError(f"{file}: unexpected tensor {place.key}, which this architecture does not have")
        tensor = GGUFTensor(file, place, names.heads_of_rows(name, *heads), names.has_one_added(name))
        if tensor.num_heads and shape[0] % (2 * tensor.num_heads):
            raise TensorFileError(
                f"{file}: tensor {place.key} has {shape[0]} rows, which are not {tensor.num_heads} even heads"
            )
        if tensor.kind.is_quantized and (len(shape) != 2 or tensor.has_one_added):
            raise TensorFileError(
                f"{file}: tensor {place.key} is {place.dtype} {list(shape)}; only matrices of linears and embeddings "
                "may be quantised"
            )
        found[name] = tensor
    return found
