"""PEFT's files as an adapter: `adapter_config.json` and `adapter_model.safetensors`, read one piece at a time.

`read_peft` reads the configuration and the header of the weights, and finds the place of every tensor; it reads no
values. `LinearReader` then reads the values of one linear in pieces of bounded size, as the wire format has them: the
scale in B, the magnitude of DoRA divided by the lengths of the adapted weight's rows, and the outputs of a fused
`gate_up_proj` with their halves exchanged. Sources, requests and the converter all read adapters by this module.

A tensor that nobody here understands is refused by its name. To serve a kind of adapters, give its tensors' endings a
part in `_PARTS`, take its names out of `_REFUSED_KEYS`, and put the tensors into `PeftAdapter`: one linear's are found
by `_linear`, a part of the model that is no linear of a layer has a name that `_split_key` tells. The fields of the
configuration are `peft_config`'s, the forms of experts `peft_experts`'.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from multilora_wire.adapter_origin import AdaptedLinear, AdapterOrigin, WrongBaseModel, describe_missing
from multilora_wire.bfloat16 import bfloat16_to_float32, float32_to_bfloat16
from multilora_wire.messages import shown
from multilora_wire.module_names import MLP_GATE_UP, MODULE_IDS
from multilora_wire.peft_config import (
    BIASES_ADVICE,
    MAX_CONFIG_BYTES,
    MAX_QUOTED_CHARS,
    MLX_ADVICE,
    PEFT_CONFIG_FILE,
    PEFT_WEIGHTS_FILE,
    PeftConfig,
    PeftError,
    SitesMissing,
    check_config_bytes,
    parse_peft_config,
    quoted,
)
from multilora_wire.peft_experts import SIDES, ExpertPair, ExpertTensors, FoundPart
from multilora_wire.sites import (
    EMBEDDING_LORA,
    EMBEDDING_ROWS,
    HEAD_LORA,
    HEAD_ROWS,
    LAYERS,
    OUTER_LAYER,
    TIED_ROWS,
    LayerStack,
    ModelSites,
    OuterSites,
)
from multilora_wire.tensor_file import (
    MAX_HEADER_BYTES,
    ByteSource,
    FileBytes,
    StoredMatrix,
    TensorFileError,
    TensorPlace,
    TensorSlice,
    read_tensor_places,
)

AdapterDtype = Literal["FP16", "BF16", "FP32"]
Array = npt.NDArray[Any]
Part = Literal["a", "b", "magnitude", "rows", "saved"]

NUMPY_DTYPES: Mapping[AdapterDtype, type[np.generic]] = {"FP16": np.float16, "BF16": np.uint16, "FP32": np.float32}
"""The types in which values of adapters are held; NumPy has no bfloat16, and holds its bits."""

_EXPONENTS: Mapping[AdapterDtype, np.uint16 | np.uint32] = {
    "FP16": np.uint16(0x7C00),
    "BF16": np.uint16(0x7F80),
    "FP32": np.uint32(0x7F80_0000),
}
"""The bits of the exponent. An infinity has all of them."""

MAX_PIECE_VALUES = 1 << 20
"""Values that are read at once; 4 MiB as float32."""

_MAX_UNMIXED_BYTES = 32 << 20
"""Of matrices that alternate value by value in a tensor, so many bytes are read apart at once."""

_PANEL = 16
"""Rows of B that codes are made of together; pieces of B begin at multiples."""

_FILE_DTYPES: Mapping[str, AdapterDtype] = {"F16": "FP16", "BF16": "BF16", "F32": "FP32"}
_ITEM_DTYPES: Mapping[str, str] = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}
_TENSORS_PER_COLUMN = 3
_HEADER_BYTES_PER_TENSOR = 512
"""Of a header of safetensors, which is JSON, and has notes of the trainer's beside the tensors."""

_PARTS: Mapping[str, Part] = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
"""The endings of the tensors that are read, after the name of their linear."""

_OUTER_PARTS: Mapping[str, Part] = {
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "token_adapter.trainable_tokens_delta": "rows",
    "trainable_tokens_delta": "rows",
    "weight": "saved",
    "base_layer.weight": "saved",
    "token_adapter.base_layer.weight": "saved",
}
_HEAD_PARTS: Mapping[str, Part] = {"lora_A.weight": "a", "lora_B.weight": "b", **_OUTER_PARTS}
_EMBEDDING_PARTS: Mapping[str, Part] = {"lora_embedding_A": "a", "lora_embedding_B": "b", **_OUTER_PARTS}
"""The same after the names of the head and of the embeddings."""

_TRAINING_KEYS: Mapping[str, re.Pattern[str]] = {
    "velora_config": re.compile(r"\.lora_velora_embed$"),
    "monteclora_config": re.compile(
        r"\.lora_monteclora_sampler\.(std_prior|expert_weights_prior|gaussian_var_prior|expert_weights)$"
    ),
}
"""Tensors that only the training of these variants reads, and that are passed over."""

_TEXT_MODEL = re.compile(r"(?:model|(?:model\.)?(?:language_model|text_model)(?:\.model)?)\.(?=layers\.)")
"""The beginning of the name of a decoder layer in PEFT's model: of a text model, or of the text part of one with
pictures."""

_STACKED_LAYER = re.compile(r"(encoder|decoder)\.block\.|model\.(encoder|decoder)\.layers\.")
"""The beginning of the name of a layer in T5's and BART's models, which may have two lists of layers."""

_LAYER = re.compile(r"layers\.([0-9]{1,6})\.([\w.]+)", re.ASCII)

_ROUTERS = dict.fromkeys(("block_sparse_moe.gate", "mlp.router", "mlp.router.linear"), "mlp.gate")
"""Mixtral's, gpt-oss's and Unsloth's names of the router, which has one name in all sites."""

EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"
"""Names of the modules before and after the layers, in a text model."""

_OUTER_MODULES: Mapping[str, re.Pattern[str]] = {
    EMBEDDINGS: re.compile(
        r"(?:model|(?:model\.)?(?:language_model|text_model)(?:\.model)?)\.embed_tokens"
        r"|(?:model\.)?(?:shared|(?:encoder|decoder)\.embed_(?:tokens|positions))"
    ),
    HEAD: re.compile(r"(?:(?:model\.)?(?:language_model|text_model)\.)?lm_head"),
}
"""Their names in PEFT's model."""

_MLX_MATRIX = "is MLX's form of a matrix, which is transposed"
_OTHER_PART = (
    "it belongs to the part of the model that reads pictures or sound, and only the text part is served; train with "
    "PEFT's exclude_modules for that part"
)

_REFUSED_KEYS: Mapping[re.Pattern[str], str] = {
    re.compile(pattern): reason
    for pattern, reason in {
        r"modules_to_save": "of whole saved modules (modules_to_save) only embed_tokens and lm_head are served",
        r"\.bias$": BIASES_ADVICE,
        r"\.lora_[ab]$": _MLX_MATRIX,
        r"vision|visual|image|multi_?modal|connector|projector|audio": _OTHER_PART,
        r"norm\.weight$": "whole saved norms are not supported",
    }.items()
}
"""What a tensor with such a key is, and why it is refused; the first that matches tells."""


class BaseTiles(Protocol):
    """The weights of a base model, which DoRA's magnitudes and saved copies refer to."""

    def tiles(self, name: str, shape: tuple[int, int]) -> Iterator[npt.NDArray[np.float32]]:
        """The weight `[out, in]` of the linear `name`, or `[vocabulary, hidden size]` of embeddings, by some rows."""
        ...


@dataclass(frozen=True)
class PeftLinear:
    """One adapted linear: y += scaling * x A^T B^T.

    name: of the module in the base model, such as `model.layers.3.self_attn.q_proj`.
    module_id, layer: its place in the wire format. a: `[rank, in]`. b: `[out, rank]`.
    scaling: alpha / rank, or alpha / sqrt(rank).
    magnitude: `[out]`, of a DoRA linear (arXiv:2402.09353): how long the rows of its adapted weight are made.
    base_name: of the module that has the base's weight, where it is another one.
    expert: of the router's choices, where the linear is one of several experts.

    Of the embeddings x is a token: a row of ones and zeros, and a `[rank, vocabulary]`.
    """

    name: str
    module_id: int
    layer: int
    a: StoredMatrix
    b: StoredMatrix
    scaling: float
    magnitude: TensorPlace | None = None
    base_name: str = ""
    expert: int = 0

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def in_size(self) -> int:
        return self.a.shape[1]

    @property
    def out_size(self) -> int:
        return self.b.shape[0]


@dataclass(frozen=True)
class PeftRows:
    """Rows of tokens that replace rows of the embeddings, the head or both.

    module_id: `EMBEDDING_ROWS`, `HEAD_ROWS` or `TIED_ROWS`. base_name: of the module that has the base's weight.
    trained: `[n, hidden size]`, the rows of `token_ids` in their order; None for a saved copy alone.
    saved: `[vocabulary, hidden size]`, a copy; its rows count where they differ from the base's.
    """

    module_id: int
    base_name: str
    token_ids: tuple[int, ...] = ()
    trained: TensorPlace | None = None
    saved: TensorPlace | None = None


@dataclass(frozen=True, eq=False)
class FoundRows:
    """The rows that count. token_ids: `[n]` int64, ascending.

    tensors: that have the rows. tensor_of, row_of: `[n]` int64, for each token an index of `tensors`, and a row of it.
    """

    token_ids: npt.NDArray[np.int64]
    tensors: tuple[TensorPlace, ...]
    tensor_of: npt.NDArray[np.int64]
    row_of: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """An adapter of PEFT's files, without its values. linears: by layer, module id and expert.

    dtype: that of the file, FP32 when the file mixes several. base_model: the name that the adapter gives its model.
    outer: LoRA on the embeddings and the head. rows: rows of tokens.
    """

    config: PeftConfig
    source: ByteSource
    linears: tuple[PeftLinear, ...]
    dtype: AdapterDtype
    outer: tuple[PeftLinear, ...] = ()
    rows: tuple[PeftRows, ...] = ()

    @property
    def base_model(self) -> str:
        return self.config.base_model

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices and magnitudes as they are used; of an A that several linears have, once."""
        num_values = sum(a.shape[0] * a.shape[1] for a in {linear.a for linear in self.linears})
        num_values += sum(linear.out_size * (linear.rank + (linear.magnitude is not None)) for linear in self.linears)
        return num_values * np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    @property
    def origin(self) -> AdapterOrigin:
        """The model that the adapter was made for."""
        rows = {(linear.layer, linear.module_id): _adapted(linear) for linear in self.linears}
        return AdapterOrigin(tuple(rows.values()), self.base_model)


@dataclass(frozen=True, eq=False)
class Values:
    """Some rows of A, B or the magnitude of a linear, in the order of the wire format.

    index: 0 is A, 1 is B, 2 is the magnitude. first: the first row. values: `[rows, columns]`, or `[rows]` of a
    magnitude, in the NumPy type of the adapter's dtype (`NUMPY_DTYPES`).
    """

    index: int
    first: int
    values: Array


def read_peft(
    config: bytes | memoryview,
    source: ByteSource,
    sites: ModelSites | None = None,
    model: str = "",
    trusts_patterns: bool = False,
) -> PeftAdapter:
    """Read and check an adapter's configuration and the header of its weights, but no values.

    config: the bytes of `adapter_config.json`. source: the bytes of `adapter_model.safetensors`. sites: of
    the adapter's model, if they are known; model: its name. trusts_patterns: see `parse_peft_config`.
    Raises PeftError naming the field or key that stands in the way, or WrongBaseModel with the sizes of both models.
    """
    settings = parse_peft_config(config, sites, trusts_patterns)
    places = _read_places(source, sites)
    found, experts, found_outside = _find_parts(places.values(), settings, sites)
    linears = [_linear(path, parts, settings, sites, model) for path, parts in found.items()]
    linears += map(_expert_linear, experts.pairs(settings, sites, model))
    linears.sort(key=lambda linear: (linear.layer, linear.module_id, linear.expert))
    outside = _Outside(found_outside, settings, source, sites)
    outer, rows = outside.linears(), outside.rows()
    if sites is not None:
        AdapterOrigin(tuple(map(_adapted, (*linears, *outer))), settings.base_model).check(sites, model)
    for linear in (*linears, *outer):
        _check_sizes(linear, settings)
    dtypes = {_FILE_DTYPES[place.dtype] for place in places.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else "FP32"
    return PeftAdapter(settings, source, tuple(linears), dtype, outer, rows)


@contextmanager
def open_peft_directory(
    directory: Path, sites: ModelSites | None = None, model: str = "", trusts_patterns: bool = False
) -> Iterator[PeftAdapter]:
    """`read_peft` of the files in a directory. Values can be read while the context lasts. Raises OSError, too."""
    config_path, weights_path = directory / PEFT_CONFIG_FILE, directory / PEFT_WEIGHTS_FILE
    if not config_path.is_file():
        raise PeftError(f"{PEFT_CONFIG_FILE} is missing")
    if not weights_path.is_file():
        names = [entry.name for entry in directory.iterdir()]
        raise PeftError(describe_foreign(names) or f"{PEFT_WEIGHTS_FILE} is missing")
    with FileBytes(config_path) as config, FileBytes(weights_path) as weights:
        check_config_bytes(config.num_bytes)
        text = config.read(0, config.num_bytes)
        yield read_peft(text, weights, sites, model, trusts_patterns)


class LinearReader:
    """Reads the values of an adapter's linears, a piece at a time."""

    def __init__(self, adapter: PeftAdapter, base: BaseTiles | None = None, dtype: AdapterDtype | None = None) -> None:
        """base: the base model's weights, which DoRA needs. dtype: of the values; None is the adapter's own."""
        self._source = adapter.source
        self._copies = {rows.module_id: rows for rows in adapter.rows if rows.saved is not None}
        self._base = base
        self._dtype: AdapterDtype = dtype or adapter.dtype
        self._unmixed: tuple[StoredMatrix | None, Array] = (None, np.empty(0))

    def read(self, linear: PeftLinear, bounds: Sequence[int] = ()) -> Iterator[Values]:
        """All values of a linear in their order on the wire: A, B with the scale, and the magnitude of DoRA.

        bounds: rows of B at which its parts begin, and their end; no piece goes beyond one. Raises PeftError for values
        that are not finite or do not fit the dtype, and the errors of the base's weights.

        The A of the embeddings comes as `[vocabulary, rank]`, in whole units as B does.
        """
        if linear.module_id == EMBEDDING_LORA:
            for first, stop in _row_pieces((0, linear.in_size), linear.rank, unit=_PANEL):
                yield Values(0, first, self._cast(self._columns(linear.a, first, stop), linear.name))
        else:
            for first, stop in _row_pieces((0, linear.rank), linear.in_size, unit=1):
                yield Values(0, first, self._unscaled(linear.a, first, stop, linear.name))
        is_swapped = linear.module_id == MLP_GATE_UP
        half = linear.out_size // 2 if is_swapped else 0
        ends = sorted({0, half, linear.out_size, *bounds})
        for first, stop in _row_pieces(ends, linear.rank, unit=_PANEL):
            start = (first + half) % linear.out_size if is_swapped else first
            yield Values(1, first, self._cast(self._scaled(linear, start, start + stop - first), linear.name))
        if linear.magnitude is not None:
            magnitude = self._normalised(linear, linear.magnitude)
            yield Values(2, 0, self._cast(np.roll(magnitude, half), linear.name))

    def find_rows(self, rows: PeftRows) -> FoundRows:
        """Compare a saved copy with the base, rounded as the copy is. Trained rows count as they are."""
        tensors: list[TensorPlace] = []
        found: list[tuple[Array, Array]] = []  # token ids and rows, of each tensor
        if (trained := rows.trained) is not None:
            tensors.append(trained)
            found.append((np.array(rows.token_ids, np.int64), np.arange(len(rows.token_ids))))
        if (saved := rows.saved) is not None:
            if self._base is None:
                raise PeftError(f"{_shown(saved)} is a copy, which takes the base model's weights to compare")
            is_changed = [changed for _, _, changed in self._compared(saved, rows.base_name, self._base)]
            tensors.append(saved)
            found.append((changed_ids := np.concatenate(is_changed).nonzero()[0], changed_ids))
        ids, row_of = (np.concatenate(columns) for columns in zip(*found, strict=True))
        tensor_of = np.repeat(np.arange(len(tensors)), [len(part) for part, _ in found])
        token_ids, firsts = np.unique(ids, return_index=True)  # the trained row of a token, if it has both
        return FoundRows(token_ids, tuple(tensors), tensor_of[firsts], row_of[firsts])

    def read_rows(self, found: FoundRows, name: str) -> Iterator[Values]:
        """The rows `[n, hidden size]`, some after others, as pieces of a B. name: for messages."""
        hidden_size = found.tensors[0].shape[1]
        for first, stop in _row_pieces((0, len(found.token_ids)), hidden_size, unit=1):
            rows = np.empty((stop - first, hidden_size), np.float32)
            for start, end in _runs(found.tensor_of[first:stop], found.row_of[first:stop]):
                place, row = found.tensors[found.tensor_of[first + start]], int(found.row_of[first + start])
                values = self._values(place, row * hidden_size, (row + end - start) * hidden_size)
                rows[start:end] = values.reshape(-1, hidden_size)
            yield Values(1, first, self._cast(rows, name))

    def _scaled(self, linear: PeftLinear, first: int, stop: int) -> npt.NDArray[np.float32]:
        with np.errstate(over="ignore"):
            return self._rows(linear.b, first, stop) * np.float32(linear.scaling)

    def _normalised(self, linear: PeftLinear, magnitude: TensorPlace) -> npt.NDArray[np.float32]:
        """The magnitude divided by the lengths of the rows of W + B A, float32 `[out]`."""
        if self._base is None:
            raise PeftError(
                f"{linear.name} is a DoRA module, which takes the base model's weights to convert: name its checkpoint "
                "(multilora convert --base-model DIR)"
            )
        find_lengths = self._lengths_of_columns if linear.module_id == EMBEDDING_LORA else self._lengths_of_rows
        lengths = find_lengths(linear, self._base)
        if not lengths.all():
            raise PeftError(f"{linear.name} has a row of zeros, which no magnitude can stretch")
        values: npt.NDArray[np.float32] = self._values(magnitude, 0, magnitude.shape[0]) / lengths
        return values

    def _compared(self, saved: TensorPlace, base_name: str, base: BaseTiles) -> Iterator[tuple[Array, Array, Array]]:
        """Some rows of the base's weight and of its saved copy, both float32, and which of the rows differ."""
        hidden_size, first = saved.shape[1], 0
        for weight in base.tiles(base_name, (saved.shape[0], hidden_size)):
            stop = first + len(weight)
            copied = self._values(saved, first * hidden_size, stop * hidden_size).reshape(-1, hidden_size)
            yield weight, copied, (copied != _rounded(weight, saved.dtype)).any(axis=1)
            first = stop

    def _adapted_tiles(
        self, linear: PeftLinear, shape: tuple[int, int], base: BaseTiles
    ) -> Iterator[npt.NDArray[np.float32]]:
        """The weight that a linear's update is added to, by some rows: the base's, with the changed rows of a copy."""
        own = {EMBEDDING_LORA: EMBEDDING_ROWS, HEAD_LORA: HEAD_ROWS}.get(linear.module_id)
        rows = None if own is None else self._copies.get(own) or self._copies.get(TIED_ROWS)
        if rows is None or rows.saved is None:
            yield from base.tiles(linear.base_name or linear.name, shape)
            return
        for weight, copied, is_changed in self._compared(rows.saved, rows.base_name, base):
            yield np.where(is_changed[:, None], copied, weight)

    def _lengths_of_rows(self, linear: PeftLinear, base: BaseTiles) -> npt.NDArray[np.float32]:
        lengths = np.empty(linear.out_size, np.float32)
        a, first = self._rows(linear.a, 0, linear.rank), 0
        for weight in self._adapted_tiles(linear, (linear.out_size, linear.in_size), base):
            stop = first + len(weight)
            lengths[first:stop] = np.linalg.norm(weight + self._scaled(linear, first, stop) @ a, axis=1)
            first = stop
        return lengths

    def _lengths_of_columns(self, linear: PeftLinear, base: BaseTiles) -> npt.NDArray[np.float32]:
        """Of embeddings, whose weight is transposed: a row is one value of each token."""
        squares = np.zeros(linear.out_size, np.float64)
        b, first = self._scaled(linear, 0, linear.out_size), 0
        for weight in self._adapted_tiles(linear, (linear.in_size, linear.out_size), base):
            stop = first + len(weight)
            squares += np.square(weight + self._columns(linear.a, first, stop) @ b.T).sum(axis=0, dtype=np.float64)
            first = stop
        return np.sqrt(squares).astype(np.float32)

    def _columns(self, matrix: StoredMatrix, first: int, stop: int) -> npt.NDArray[np.float32]:
        """Columns of a matrix, each as a row, float32."""
        height, width = matrix.shape
        rows = (self._values(matrix.place, row * width + first, row * width + stop) for row in range(height))
        return np.stack(list(rows), axis=1)

    def _rows(self, matrix: StoredMatrix, first: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows of a matrix as it is used, float32."""
        return self._floats(self._stored_rows(matrix, first, stop), matrix.place)

    def _unscaled(self, matrix: StoredMatrix, first: int, stop: int, name: str) -> Array:
        """Rows of a matrix in the dtype of the values. name: for messages."""
        place = matrix.place
        if _FILE_DTYPES[place.dtype] != self._dtype:
            return self._cast(self._rows(matrix, first, stop), name)
        rows = self._stored_rows(matrix, first, stop)
        if not self._are_finite(rows):
            raise PeftError(f"{_shown(place)} holds NaN or infinite values")
        return rows.copy()

    def _stored_rows(self, matrix: StoredMatrix, first: int, stop: int) -> Array:
        """Rows of a matrix as it is used, in the file's dtype."""
        if matrix.slice is not None:
            return self._rows_of_slice(matrix, matrix.slice, first, stop)
        columns = matrix.shape[1]
        width = columns // matrix.num_blocks
        stored = self._stored(matrix.place, first * width, stop * width).reshape(-1, width)
        if matrix.num_blocks == 1:
            return stored
        rows = np.zeros((stop - first, columns), stored.dtype)
        height = matrix.shape[0] // matrix.num_blocks
        for block in range(first // height, -(-stop // height)):
            inside = slice(max(first, block * height) - first, min(stop, (block + 1) * height) - first)
            rows[inside, block * width : (block + 1) * width] = stored[inside]
        return rows

    def _rows_of_slice(self, matrix: StoredMatrix, part: TensorSlice, first: int, stop: int) -> Array:
        if part.num_mixed > 1:
            apart: Array = self._read_apart(matrix, part)[first:stop]
            return apart
        height, width = stop - first, matrix.shape[1]
        start, extent = part.start + first * part.row_stride, (height - 1) * part.row_stride + 1
        with_columns = extent + (width - 1) * part.column_stride
        if part.column_stride == 1 or with_columns <= 2 * height * width:
            run = self._stored(matrix.place, start, start + with_columns)
            strides = (part.row_stride * run.itemsize, part.column_stride * run.itemsize)
            return np.lib.stride_tricks.as_strided(run, (height, width), strides)
        starts = range(start, start + width * part.column_stride, part.column_stride)
        columns = [self._stored(matrix.place, begin, begin + extent)[:: part.row_stride] for begin in starts]
        return np.stack(columns, axis=1)

    def _read_apart(self, matrix: StoredMatrix, part: TensorSlice) -> Array:
        """A matrix that alternates with others, value by value, as the file has its values.

        Others of them are kept, as many as `_MAX_UNMIXED_BYTES` hold, so that the tensor is not read for each anew.
        """
        place, (height, width), count = matrix.place, matrix.shape, part.num_mixed
        item = np.dtype(_ITEM_DTYPES[place.dtype])
        number = part.start % count
        at_once = max(1, min(count, _MAX_UNMIXED_BYTES // (height * width * item.itemsize)))
        first = number // at_once * at_once
        key = replace(matrix, slice=replace(part, start=part.start - number + first))
        if self._unmixed[0] != key:
            self._unmixed = (None, np.empty(0))
            self._unmixed = (key, self._unmix(key, min(at_once, count - first)))
        apart: Array = self._unmixed[1][number - first]
        return apart

    def _unmix(self, matrix: StoredMatrix, at_once: int) -> Array:
        """`at_once` neighbours of the matrices that alternate, from this one on: `[at_once, rows, columns]`."""
        place, part = matrix.place, matrix.slice
        assert part is not None, "of a tensor"
        count, number = part.num_mixed, part.start % part.num_mixed
        is_by_rows = part.row_stride >= part.column_stride
        (num_lines, length), stride = matrix.shape, part.row_stride
        if not is_by_rows:
            num_lines, length, stride = length, num_lines, part.column_stride
        apart = np.empty((at_once, num_lines, length), _ITEM_DTYPES[place.dtype])
        step = max(1, MAX_PIECE_VALUES // stride)
        for first in range(0, num_lines, step):
            stop = min(first + step, num_lines)
            begin = part.start - number + first * stride
            run = self._stored(place, begin, begin + (stop - first - 1) * stride + length * count)
            lines = np.lib.stride_tricks.as_strided(
                run, (stop - first, length, count), (stride * run.itemsize, count * run.itemsize, run.itemsize)
            )
            apart[:, first:stop] = lines[:, :, number : number + at_once].transpose(2, 0, 1)
        return apart if is_by_rows else apart.transpose(0, 2, 1)

    def _values(self, place: TensorPlace, first: int, stop: int) -> npt.NDArray[np.float32]:
        """Values of a tensor by their places in it, float32. Raises PeftError unless all are finite."""
        return self._floats(self._stored(place, first, stop), place)

    def _stored(self, place: TensorPlace, first: int, stop: int) -> Array:
        """Values of a tensor by their places in it, as NumPy has them."""
        item = np.dtype(_ITEM_DTYPES[place.dtype])
        try:
            data = self._source.read(place.start + first * item.itemsize, place.start + stop * item.itemsize)
        except TensorFileError as error:
            raise PeftError(f"{PEFT_WEIGHTS_FILE}: {error}") from None
        return np.frombuffer(data, item)

    def _floats(self, stored: Array, place: TensorPlace) -> npt.NDArray[np.float32]:
        values = bfloat16_to_float32(stored) if place.dtype == "BF16" else stored.astype(np.float32)
        if not np.isfinite(values).all():
            raise PeftError(f"{_shown(place)} holds NaN or infinite values")
        return values

    def _cast(self, values: npt.NDArray[np.float32], name: str) -> Array:
        """Cast values; one beyond the range of the dtype is an error, never an infinity."""
        with np.errstate(over="ignore"):
            cast: Array = (
                values.astype(NUMPY_DTYPES[self._dtype]) if self._dtype != "BF16" else float32_to_bfloat16(values)
            )
        if not self._are_finite(cast):
            largest = np.abs(values).max()
            raise PeftError(f"{name}: {largest:g} does not fit into {self._dtype}; use a wider storage type")
        return cast

    def _are_finite(self, values: Array) -> bool:
        """Whether all values of the reader's dtype are finite; by their bits, as NumPy knows no bfloat16."""
        exponent = _EXPONENTS[self._dtype]
        bits: Array = values.view(exponent.dtype)
        return not (np.bitwise_and(bits, exponent) == exponent).any()


def describe_foreign(names: Collection[str]) -> str:
    """What a directory with files of these names holds, if PEFT's adapter is not in it, and what to do with it.

    "" where nobody can tell.
    """
    adapters = sorted(name for name in names if name.startswith(("adapter", "lora")))
    if any(name.endswith("adapters.safetensors") for name in names):
        return f"adapters.safetensors: {MLX_ADVICE}"
    if pickles := [name for name in adapters if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]:
        return (
            f"{pickles[0]} is a pickle, which can run code when it is read; only safetensors is read. Save the adapter "
            "again with save_pretrained(..., safe_serialization=True)"
        )
    if ggufs := sorted(name for name in names if name.endswith(".gguf")):
        return f"{ggufs[0]} is llama.cpp's form, which is read where it is the one file of an adapter"
    if "config.json" in names and not {PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE} & set(names):
        return (
            "config.json belongs to the checkpoint of a whole model, which is no adapter; multilora-serve --model "
            "serves it"
        )
    if others := [name for name in adapters if name.endswith(".safetensors") and name != PEFT_WEIGHTS_FILE]:
        return f"{others[0]} is not in PEFT's form, which is {PEFT_CONFIG_FILE} with {PEFT_WEIGHTS_FILE}"
    return ""


def _row_pieces(bounds: Sequence[int], columns: int, unit: int) -> Iterator[tuple[int, int]]:
    """Runs of rows between bounds: whole units of rows, of at most `MAX_PIECE_VALUES` values or one unit."""
    step = max(1, MAX_PIECE_VALUES // (columns * unit)) * unit
    for start, end in pairwise(bounds):
        for first in range(start, end, step):
            yield first, min(first + step, end)


def _read_places(source: ByteSource, sites: ModelSites | None) -> dict[str, TensorPlace]:
    """The tensors of the file. Raises PeftError, also for more tensors than an adapter of the model has."""
    max_tensors, max_header_bytes = None, MAX_HEADER_BYTES
    if sites is not None:
        # Beside A, B and the magnitude, embeddings and head may have a copy and trained rows.
        max_tensors = _TENSORS_PER_COLUMN * sites.num_columns + len(sites.outer_modules)
        max_header_bytes = _HEADER_BYTES_PER_TENSOR * max_tensors + MAX_CONFIG_BYTES
    try:
        places = read_tensor_places(source, max_header_bytes)
    except TensorFileError as error:
        raise PeftError(f"{PEFT_WEIGHTS_FILE} is not a safetensors file: {error}") from None
    if not places:
        raise PeftError(f"{PEFT_WEIGHTS_FILE} holds no tensors")
    if max_tensors is not None and len(places) > max_tensors:
        raise PeftError(
            f"{PEFT_WEIGHTS_FILE} has {len(places)} tensors, an adapter of this model has {max_tensors} at most"
        )
    for place in places.values():
        if place.dtype not in _FILE_DTYPES:
            raise PeftError(f"{_shown(place)} is {shown(place.dtype)}; F16, BF16 and F32 are supported")
    return places


@dataclass(frozen=True)
class _Module:
    """A linear of a layer. name: of its site, such as `layers.3.mlp.up_proj`. linear: without its layer.

    stack: the list that the layer is in. index: its number there.
    """

    stack: LayerStack
    index: int
    linear: str

    @property
    def layer(self) -> int:
        return self.stack.first + self.index

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.linear}"

    @property
    def full_name(self) -> str:
        return f"{self.stack.name}.{self.index}.{self.linear}"


_Parts = dict[Part, FoundPart]


def _find_parts(
    places: Collection[TensorPlace], config: PeftConfig, sites: ModelSites | None
) -> tuple[dict[_Module, _Parts], ExpertTensors, dict[str, _Parts]]:
    """The tensors of each linear of a layer, of experts, and of `EMBEDDINGS` and `HEAD`.

    Every tensor has a part or is an error.
    """
    found: dict[_Module, _Parts] = {}
    experts = ExpertTensors()
    outside: dict[str, _Parts] = {}
    for place in places:
        if any(config.is_on(field) and pattern.search(place.key) for field, pattern in _TRAINING_KEYS.items()):
            continue
        if (split := _split_outer_key(place)) is not None:
            _check_outer(place, sites)
            name, peft_name, part = split
            parts = outside.setdefault(name, {})
        else:
            module, peft_name, part = _split_key(place, sites)
            side = part if part == "a" or part == "b" else None
            if experts.add(module.layer, module.linear, side, FoundPart(place, peft_name)):
                continue
            parts = found.setdefault(module, {})
        if part in parts:
            raise PeftError(f"{_shown(place)} and {_shown(parts[part].place)} are the same matrix")
        parts[part] = FoundPart(place, peft_name)
    matrices = chain((part for parts in found.values() for part in parts.values()), experts.parts())
    if (first := next(matrices, None)) is None and not outside:
        raise PeftError(f"{PEFT_WEIGHTS_FILE} holds no matrices")
    if first is not None and config.trains_tokens_alone:
        raise PeftError(f"{_shown(first.place)}: {PEFT_CONFIG_FILE} says peft_type TRAINABLE_TOKENS, which has no LoRA")
    return found, experts, outside


def _check_outer(place: TensorPlace, sites: ModelSites | None) -> None:
    """Raises PeftError for a tensor of the embeddings or the head, if adapters cannot change these."""
    if sites is None:
        raise SitesMissing(
            f"{_shown(place)} belongs to the embeddings or the head, which no tensors of the wire can change; send "
            "the files as they are to the server of their model (multilora upload DIR)"
        )
    if sites.outer is None:
        raise PeftError(
            f"{_shown(place)} belongs to the embeddings or the head, which adapters cannot change in this model"
        )


def _split_outer_key(place: TensorPlace) -> tuple[str, str, Part] | None:
    """The part of the embeddings or the head that a tensor is, as `_split_key`; None where it is none."""
    if ".layers." in place.key:  # Nearly all of a file's tensors.
        return None
    key = place.key.removeprefix("base_model.model.")
    for module, endings in ((EMBEDDINGS, _EMBEDDING_PARTS), (HEAD, _HEAD_PARTS)):
        for ending, part in endings.items():
            name = key.removesuffix(f".{ending}")
            if name != key and _OUTER_MODULES[module].fullmatch(name):
                return module, name, part
    return None


def _split_key(place: TensorPlace, sites: ModelSites | None) -> tuple[_Module, str, Part]:
    """The module of a tensor, the module's name in PEFT's model, and the part of the module that the tensor is."""
    stacks = (LayerStack(LAYERS),) if sites is None else sites.stacks
    key = place.key.removeprefix("base_model.model.")
    for ending, part in _PARTS.items():
        name = key.removesuffix(f".{ending}")
        for stack in stacks if name != key else ():
            if (layer := _in_layer(name, stack.name)) is not None:
                return _Module(stack, int(layer[1]), _ROUTERS.get(layer[2], layer[2])), name, part
    for pattern, reason in _REFUSED_KEYS.items():
        if pattern.search(place.key):
            separator = " " if reason.startswith("is ") else ": "
            advice = f". {MLX_ADVICE}" if reason == _MLX_MATRIX else ""
            raise PeftError(f"{_shown(place)}{separator}{reason}{advice}")
    if sites is None and _STACKED_LAYER.match(key):
        raise SitesMissing(
            f"{_shown(place)} belongs to a model with an encoder or of other names, and only the base model's "
            "config.json tells its layers: name its directory (multilora convert --base-model DIR)"
        )
    names, others = " or ".join(f"{stack.name}.N...." for stack in stacks), ""
    if stacks[0].name == LAYERS:
        others = ", also below language_model or text_model"
    kind = "decoder layer" if len(stacks) == 1 else "layer"
    raise PeftError(f"{_shown(place)} is not a LoRA matrix of a {kind} ([base_model.model.]{names}{others})")


def _in_layer(name: str, layers_name: str) -> re.Match[str] | None:
    """The number of the layer, and the name within it, of a module in PEFT's model; None outside the layers."""
    if layers_name != LAYERS:
        return (
            _LAYER.fullmatch("layers" + name.removeprefix(layers_name)) if name.startswith(f"{layers_name}.") else None
        )
    prefix = _TEXT_MODEL.match(name)
    return None if prefix is None else _LAYER.fullmatch(name, prefix.end())


def _linear(
    module: _Module, parts: Mapping[Part, FoundPart], config: PeftConfig, sites: ModelSites | None, model: str
) -> PeftLinear:
    first = next(iter(parts.values()))
    module_id = _module_id(module, first.place, config, sites, model)
    for part, side in SIDES.items():
        if part not in parts:
            raise PeftError(f"{_shown(first.place)} has no {side} beside it")
    config.check_target(name := config.settings_name(first.peft_name))
    a_blocks, b_blocks = config.num_blocks(first.peft_name)
    a, b = _matrix(parts["a"].place, a_blocks), _matrix(parts["b"].place, b_blocks)
    scaling = config.scaling(name, _check_ranks(a, b, config, name))
    magnitude = parts["magnitude"].place if "magnitude" in parts else None
    return PeftLinear(module.full_name, module_id, module.layer, a, b, scaling, magnitude)


def _expert_linear(pair: ExpertPair) -> PeftLinear:
    module = pair.module
    return PeftLinear(pair.name, module.module_id, module.layer, pair.a, pair.b, pair.scaling, expert=pair.expert)


def _module_id(module: _Module, place: TensorPlace, config: PeftConfig, sites: ModelSites | None, model: str) -> int:
    """The wire's id of a linear. Raises PeftError, or WrongBaseModel if the model has no such linear."""
    if sites is None:
        if module.linear not in MODULE_IDS:
            raise PeftError(
                f"{_shown(place)}: unknown module {module.linear[:MAX_QUOTED_CHARS]!r}; supported are "
                f"{', '.join(MODULE_IDS)}"
            )
        return MODULE_IDS[module.linear]
    wire_module = sites.module_named.get(module.name)
    name = module.full_name[:MAX_QUOTED_CHARS]
    if module.index >= (num_layers := sites.layers_in(module.stack)):
        here = module.stack.name if sites.has_encoder else "the model"
        difference = f"{name} is a layer there, and {here} here has {num_layers} layers"
        raise WrongBaseModel.of(config.base_model, model, difference)
    if wire_module is None:
        raise WrongBaseModel.of(config.base_model, model, describe_missing(name, module.layer, sites))
    return wire_module.module_id


def _matrix(place: TensorPlace, num_blocks: int) -> StoredMatrix:
    if len(place.shape) != 2 or 0 in place.shape:
        raise PeftError(f"{_shown(place)} has shape {list(place.shape)}; a matrix is expected")
    if place.shape[0] % num_blocks:
        raise PeftError(
            f"{_shown(place)} has shape {list(place.shape)}, and {PEFT_CONFIG_FILE} says that it is {num_blocks} blocks"
        )
    return StoredMatrix(place, (place.shape[0], place.shape[1] * num_blocks), num_blocks)


def _check_sizes(linear: PeftLinear, config: PeftConfig) -> None:
    """Check what another base model cannot explain: DoRA's magnitude, and halves of a fused module."""
    place = linear.magnitude
    if config.use_dora != (place is not None):
        found = f"has {_shown(place)}" if place else f"has no lora_magnitude_vector of {linear.name}"
        raise PeftError(f"{PEFT_CONFIG_FILE}: use_dora is {config.use_dora}, but {PEFT_WEIGHTS_FILE} {found}")
    if place is not None and place.shape != (linear.out_size,):
        raise PeftError(f"{_shown(place)} has shape {list(place.shape)}, expected [{linear.out_size}]")
    if linear.module_id == MLP_GATE_UP and linear.out_size % 2:
        raise PeftError(f"{linear.name} has {linear.out_size} outputs, which are not two halves")


def _adapted(linear: PeftLinear) -> AdaptedLinear:
    return AdaptedLinear(linear.name, linear.module_id, linear.layer, linear.in_size, linear.out_size)


def _shown(place: TensorPlace) -> str:
    return shown(place.key)


class _Outside:
    """Tensors of the embeddings and the head, and what they mean in PEFT's model.

    A tensor that PEFT loads into the weight itself changes both modules of a tied model. `modules_to_save`, LoRA and
    rows for one of both belong to that one alone; trained rows of the embeddings are the head's, too, unless the head
    has a list of its own.
    """

    def __init__(
        self, found: Mapping[str, _Parts], config: PeftConfig, source: ByteSource, sites: ModelSites | None
    ) -> None:
        self._found, self._config, self._source = found, config, source
        self._outer = None if sites is None else sites.outer
        self._saved_modules = _own_modules(found, config)

    @property
    def _sites(self) -> OuterSites:
        assert self._outer is not None, "checked"
        return self._outer

    def linears(self) -> tuple[PeftLinear, ...]:
        """LoRA on them."""
        with_lora = {name: parts for name, parts in self._found.items() if {"a", "b", "magnitude"} & parts.keys()}
        for name, parts in with_lora.items():
            first = next(iter(parts.values()))
            for part, side in SIDES.items():
                if part not in parts:
                    raise PeftError(f"{_shown(first.place)} has no {side} beside it")
            for other in self._found if self._sites.is_tied else (name,):
                if (rows := self._found[other].get("rows")) is not None:
                    raise PeftError(
                        f"{_shown(rows.place)} are trained rows of a module that also has LoRA, {_shown(first.place)}: "
                        "PEFT computes no such module"
                    )
            if name in self._saved_modules:
                raise PeftError(f"{_shown(first.place)} is LoRA on {name}, which modules_to_save replaces")
            # PEFT writes matrices for both modules then, and lists one of them in target_modules.
            self._check_tying(parts["a"].place)
        return tuple(self._linear(name, parts) for name, parts in with_lora.items())

    def rows(self) -> tuple[PeftRows, ...]:
        """Trained rows and copies."""
        trained, saved = self._trained(), self._saved()
        modules = sorted({*saved, *trained})
        if TIED_ROWS in modules and len(modules) > 1:
            raise PeftError(
                f"{PEFT_WEIGHTS_FILE} changes both modules of a tied model at once and one of them alone, which is not "
                "served"
            )
        found = []
        for module_id in modules:
            token_ids, place = trained.get(module_id, ((), None))
            base_name = HEAD if module_id == HEAD_ROWS and not self._sites.is_tied else EMBEDDINGS
            found.append(PeftRows(module_id, base_name, token_ids, place, saved.get(module_id)))
        return tuple(found)

    def _linear(self, name: str, parts: _Parts) -> PeftLinear:
        a, b = parts["a"], parts["b"]
        self._config.check_target(a.peft_name)
        a_blocks, b_blocks = (1, 1) if name == EMBEDDINGS else self._config.num_blocks(a.peft_name)
        matrices = _matrix(a.place, a_blocks), _matrix(b.place, b_blocks)
        rank = _check_ranks(*matrices, self._config, a.peft_name)
        base_name = EMBEDDINGS if self._sites.is_tied else ""
        module_id = EMBEDDING_LORA if name == EMBEDDINGS else HEAD_LORA
        magnitude = parts["magnitude"].place if "magnitude" in parts else None
        scaling = self._config.scaling(a.peft_name, rank)
        return PeftLinear(name, module_id, OUTER_LAYER, *matrices, scaling, magnitude, base_name)

    def _check_tying(self, place: TensorPlace) -> None:
        if self._sites.is_tied and self._config.is_on("ensure_weight_tying"):
            raise PeftError(
                f"{PEFT_CONFIG_FILE}: ensure_weight_tying is true, and {_shown(place)} belongs to a tied module of "
                "this model; only trained rows of tokens are served so"
            )

    def _trained(self) -> dict[int, tuple[tuple[int, ...], TensorPlace]]:
        """Token ids and rows by module id."""
        lists = self._config.token_lists({name: self._peft_name(name) for name in (EMBEDDINGS, HEAD)})
        rows = {name: parts["rows"].place for name, parts in self._found.items() if "rows" in parts}
        is_tied = self._outer is not None and self._outer.is_tied
        if is_tied and EMBEDDINGS in rows and lists.get(HEAD, lists.get(EMBEDDINGS)) == lists.get(EMBEDDINGS):
            # PEFT has one adapter for both, which some of its tuners save twice.
            lists.pop(HEAD, None)
            if (copy := rows.pop(HEAD, None)) is not None:
                self._check_same(rows[EMBEDDINGS], copy)
            module_ids = {EMBEDDINGS: TIED_ROWS}
        else:
            module_ids = {EMBEDDINGS: EMBEDDING_ROWS, HEAD: HEAD_ROWS}
        for name, place in rows.items():
            if name not in lists:
                raise PeftError(f"{_shown(place)} holds rows of tokens, and {PEFT_CONFIG_FILE} names none of {name}")
        found: dict[int, tuple[tuple[int, ...], TensorPlace]] = {}
        for name, token_ids in lists.items():
            if token_ids and name not in rows:
                raise PeftError(f"{PEFT_CONFIG_FILE} names tokens of {name}, and {PEFT_WEIGHTS_FILE} has no rows of it")
            if token_ids:
                self._check_tokens(token_ids, rows[name])
                found[module_ids[name]] = (token_ids, rows[name])
        return found

    def _saved(self) -> dict[int, TensorPlace]:
        """Copies by module id."""
        places = {name: parts["saved"].place for name, parts in self._found.items() if "saved" in parts}
        for place in places.values():
            expected = (self._sites.vocab_size, self._sites.embeddings.out_size)
            if place.shape != expected:
                raise PeftError(
                    f"{_shown(place)} has shape {list(place.shape)}, and this model's vocabulary and hidden size are "
                    f"{list(expected)}; vocabularies of adapters are not served"
                )
            self._check_tying(place)
        found: dict[int, TensorPlace] = {}
        for name, place in places.items():
            module_id = EMBEDDING_ROWS if name == EMBEDDINGS else HEAD_ROWS
            if self._sites.is_tied and name not in self._saved_modules:
                module_id = TIED_ROWS
                self._check_same(found.get(module_id, place), place)
            found[module_id] = place
        return found

    def _peft_name(self, name: str) -> str:
        parts = self._found.get(name)
        return next(iter(parts.values())).peft_name if parts else name

    def _check_same(self, first: TensorPlace, second: TensorPlace) -> None:
        """Check that two tensors of tied modules have the same values, bit for bit."""
        if first.dtype != second.dtype or first.shape != second.shape or not _are_equal(first, second, self._source):
            raise PeftError(f"{_shown(first)} and {_shown(second)} differ, and this model has one matrix for both")

    def _check_tokens(self, token_ids: tuple[int, ...], place: TensorPlace) -> None:
        sites, where = self._sites, f"{PEFT_CONFIG_FILE}: tokens of {_shown(place)}"
        for token in token_ids:
            if not 0 <= token < sites.vocab_size:
                raise PeftError(f"{where}: {token} is not in the vocabulary of {sites.vocab_size} tokens")
        if len(set(token_ids)) < len(token_ids):
            twice = next(token for index, token in enumerate(token_ids) if token in token_ids[:index])
            raise PeftError(f"{where}: {twice} is there twice")
        expected = (len(token_ids), sites.embeddings.out_size)
        if place.shape != expected:
            raise PeftError(
                f"{_shown(place)} has shape {list(place.shape)}, and the tokens of {PEFT_CONFIG_FILE} and the hidden "
                f"size need {list(expected)}"
            )


def _own_modules(found: Mapping[str, _Parts], config: PeftConfig) -> frozenset[str]:
    """The modules that `modules_to_save` names. Raises PeftError for others, and for names without a tensor."""
    modules = set()
    for wanted in config.saved_modules:
        named = [name for name in (EMBEDDINGS, HEAD) if name.endswith(wanted)]
        if len(named) != 1:
            raise PeftError(
                f"{PEFT_CONFIG_FILE}: modules_to_save names {quoted(wanted)}; of whole modules only embed_tokens and "
                "lm_head are served"
            )
        if "saved" not in found.get(named[0], {}):
            raise PeftError(
                f"{PEFT_CONFIG_FILE}: modules_to_save names {quoted(wanted)}, and {PEFT_WEIGHTS_FILE} has none"
            )
        modules.add(named[0])
    return frozenset(modules)


def _check_ranks(a: StoredMatrix, b: StoredMatrix, config: PeftConfig, peft_name: str) -> int:
    """The rank of a pair of matrices. Raises PeftError unless both have it, and the configuration, too."""
    if a.shape[0] != b.shape[1]:
        raise PeftError(f"{_shown(a.place)} {list(a.shape)} and {_shown(b.place)} {list(b.shape)} have different ranks")
    if a.shape[0] != (rank := config.rank(peft_name)):
        raise PeftError(f"{_shown(a.place)} has rank {a.shape[0]}, but {PEFT_CONFIG_FILE} says {rank:g}")
    return a.shape[0]


def _are_equal(first: TensorPlace, second: TensorPlace, source: ByteSource) -> bool:
    step = 4 * MAX_PIECE_VALUES
    try:
        return all(
            source.read(first.start + start, min(first.start + start + step, first.stop))
            == source.read(second.start + start, min(second.start + start + step, second.stop))
            for start in range(0, first.stop - first.start, step)
        )
    except TensorFileError as error:
        raise PeftError(f"{PEFT_WEIGHTS_FILE}: {error}") from None


def _rounded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    """Values as a tensor of the format's type `dtype` has them, float32."""
    if dtype == "BF16":
        return bfloat16_to_float32(float32_to_bfloat16(values))
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32) if dtype == "F16" else values


def _runs(tensor_of: npt.NDArray[np.int64], row_of: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of neighbouring rows of one tensor."""
    ends = np.flatnonzero((np.diff(tensor_of) != 0) | (np.diff(row_of) != 1)) + 1
    return pairwise([0, *ends.tolist(), len(row_of)])
