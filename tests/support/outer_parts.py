"""The parts of adapters outside the layers: LoRA on embeddings and head, and rows of tokens, checked and stored.

`multilora_wire.sites.OuterSites` names them. No row of `lora_config` can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from blake3 import blake3

from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.format import ARENA_DTYPES, TORCH_DTYPES, check_rank, content_digest
from multilora_engine.lora.layout import PackedAdapter, PackedRow, module_of
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_wire.layout import AdapterLayout
from multilora_wire.pieces import Piece
from multilora_wire.sites import OUTER_LAYER, WireModule

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class OuterPart:
    """One part of an adapter outside the layers.

    module_id: one of `OuterSites.modules`. a: `[rank, in]`; of rows of tokens their ids, integers [n], in any order.
    b: `[out, rank]`, with the scaling in it; of rows of tokens the rows [n, hidden size]. magnitude: normalised, [out],
    of DoRA.
    """

    module_id: int
    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None = None


def add_parts(linears: PackedAdapter | None, parts: Sequence[OuterPart], layout: AdapterLayout) -> PackedAdapter:
    """An adapter with parts outside the layers. linears: its other parts; None where there are none.

    Raises InvalidRequest, naming the part with expected and actual numbers.
    """
    checked = _check_parts(parts, layout)
    old_rows = [] if linears is None else linears.rows
    old_pieces = [piece for row in old_rows for piece in layout.pieces(module_of(row, layout), row.rank, row.is_dora)]
    placement = layout.place([*(piece for part in checked for piece in part.pieces), *old_pieces])
    offsets = iter(placement.offsets)
    rows = [part.packed(offsets) for part in checked]
    rows += [replace(row, **_taken(row, offsets)) for row in old_rows]
    pages = torch.zeros(len(placement.fill), layout.page_bytes, dtype=torch.uint8)
    target = pages.view(-1)
    for part, row in zip(checked, rows, strict=False):
        for data, offset in zip(part.stored(layout), row.offsets, strict=True):
            target[offset : offset + len(data)] = data
    places = zip(old_pieces, _offsets(old_rows), _offsets(rows[len(checked) :]), strict=True)
    for piece, old, new in places:
        assert linears is not None
        target[new : new + piece.num_bytes] = linears.pages.view(-1)[old : old + piece.num_bytes]
    if not layout.code_bits:
        return PackedAdapter(content_digest(rows, pages, layout.lora_dtype), rows, pages)
    digest = blake3(b"" if linears is None else linears.digest.encode())
    for part in checked:
        part.add_to(digest)
    return PackedAdapter(digest.hexdigest(_DIGEST_BYTES), rows, pages)


def _taken(row: PackedRow, offsets: Iterator[int]) -> dict[str, int]:
    a_offset, b_offset = next(offsets), next(offsets)
    return {"a_offset": a_offset, "b_offset": b_offset, "magnitude_offset": next(offsets) if row.is_dora else -1}


def _offsets(rows: Sequence[PackedRow]) -> list[int]:
    return [offset for row in rows for offset in row.offsets]


@dataclass(frozen=True)
class _Part:
    """A part that fits the model. rank: of rows of tokens their number."""

    sent: OuterPart
    module: WireModule
    rank: int
    pieces: list[Piece]

    @property
    def is_dora(self) -> bool:
        return self.sent.magnitude is not None

    def packed(self, offsets: Iterator[int]) -> PackedRow:
        """offsets: of the pieces of this part and of later ones."""
        a_offset, b_offset = next(offsets), next(offsets)
        magnitude_offset = next(offsets) if self.is_dora else -1
        return PackedRow(self.module.module_id, OUTER_LAYER, self.rank, a_offset, b_offset, magnitude_offset)

    def tensors(self) -> list[torch.Tensor]:
        """A, B and, for DoRA, the magnitude, in the shapes that are stored; or ids, ascending, and their rows."""
        sent = self.sent
        if self.module.kind == "rows":
            token_ids, order = sent.a.long().sort()
            return [token_ids.int(), sent.b[order]]
        a = sent.a.T.contiguous() if self.module.kind == "embedding" else sent.a
        return [a, sent.b] if sent.magnitude is None else [a, sent.b, sent.magnitude]

    def stored(self, layout: AdapterLayout) -> list[torch.Tensor]:
        """The bytes of the pieces. Raises InvalidRequest for values beyond the range of the type that is stored."""
        floats = TORCH_DTYPES.get(layout.lora_dtype, torch.float32)
        a, b, *magnitude = self.tensors()
        if self.module.kind == "rows":
            return [_bytes(a), self._as_floats(b, floats)]
        if not layout.code_bits:
            return [self._as_floats(tensor, floats) for tensor in (a, b, *magnitude)]
        arena = ARENA_DTYPES[layout.lora_dtype]
        quantize = quantize_b if self.module.kind == "embedding" else quantize_a
        codes = [quantize(a.float().contiguous(), arena), quantize_b(b.float().contiguous(), arena)]
        return codes + [self._as_floats(tensor, floats) for tensor in magnitude]

    def add_to(self, digest: blake3) -> None:
        """Hash the values as they were sent."""
        digest.update(np.array([self.module.module_id, OUTER_LAYER, self.rank, self.is_dora], np.int64).tobytes())
        for tensor in self.tensors():
            digest.update(_bytes(tensor.float() if tensor.is_floating_point() else tensor).numpy().data)

    def _as_floats(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        stored = tensor.to(dtype)
        if stored.dtype != tensor.dtype and not torch.isfinite(stored).all():
            name = str(dtype).removeprefix("torch.")
            raise InvalidRequest(
                f"{self.module.name} holds values beyond the range of {name}, in which adapters are stored"
            )
        return _bytes(stored)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _check_parts(parts: Sequence[OuterPart], layout: AdapterLayout) -> list[_Part]:
    """The parts in the order in which they are stored."""
    checked = sorted((_checked(part, layout) for part in parts), key=lambda part: part.module.module_id)
    for first, second in pairwise(checked):
        if first.module is second.module:
            raise InvalidRequest(f"the adapter has {first.module.name} twice")
    return checked


def _checked(part: OuterPart, layout: AdapterLayout) -> _Part:
    module = layout.sites.module_at.get((OUTER_LAYER, part.module_id))
    if module is None:
        raise InvalidRequest("adapters may not change the embeddings or the head of this model")
    if module.parts and (name := layout.sites.site_at[module.parts[0].column].name) in layout.ruled_out:
        raise InvalidRequest(
            f"{name}: ruled out by lora_compatible or lora_target_modules of the checkpoint, and the adapter changes it"
        )
    is_rows = module.kind == "rows"
    if is_rows:
        _check_token_rows(part, module)
    else:
        _check_matrices(part, module, layout)
    for tensor in (part.b, part.magnitude, None if is_rows else part.a):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise InvalidRequest(f"{module.name} holds NaN or infinite values")
    rank = len(part.a) if is_rows else part.b.shape[1]
    return _Part(part, module, rank, layout.pieces(module, rank, part.magnitude is not None))


def _check_matrices(part: OuterPart, module: WireModule, layout: AdapterLayout) -> None:
    rank = part.b.shape[-1]
    check_rank(module.name, rank, layout)
    a_shape, b_shape = (rank, module.in_size), (module.out_size, rank)
    if part.a.shape != a_shape or part.b.shape != b_shape:
        raise InvalidRequest(
            f"{module.name}: A is {list(part.a.shape)} and B {list(part.b.shape)}, and this model needs "
            f"{list(a_shape)} and {list(b_shape)}"
        )
    if part.magnitude is not None and part.magnitude.shape != (module.out_size,):
        raise InvalidRequest(
            f"{module.name}: the magnitude is {list(part.magnitude.shape)}, and this model needs [{module.out_size}]"
        )


def _check_token_rows(part: OuterPart, module: WireModule) -> None:
    ids, rows, vocab_size = part.a, part.b, module.in_size
    if ids.dim() != 1 or not len(ids) or rows.shape != (len(ids), module.out_size):
        raise InvalidRequest(
            f"{module.name}: there are {ids.numel()} token ids and rows of shape {list(rows.shape)}, and this model "
            f"needs [{ids.numel()}, {module.out_size}]"
        )
    ordered = ids.long().sort().values
    for token in (int(ordered[0]), int(ordered[-1])):
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{module.name}: token {token} is not in the vocabulary of {vocab_size} tokens")
    if (same := ordered[1:][ordered[1:] == ordered[:-1]]).numel():
        raise InvalidRequest(f"{module.name}: token {int(same[0])} has several rows")
