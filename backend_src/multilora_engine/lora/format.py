"""The forms in which adapters come, their validation, and the packed form that every tier stores.

On the wire (TensorRT-LLM's Triton backend, `tensorrt_llm/lora_manager.py` and `examples/hf_lora_convert.py`) an adapter
is two tensors. Row i of `lora_weights` is A `[rank, in]` row-major, then B `[out, rank]` row-major, then, for DoRA, the
normalised magnitude `[out]`, then zeros up to the widest row. A row of experts is the A of all of them, `[experts,
rank, in]`, then all B, `[experts, out, rank]`. Row i of `lora_config` describes it: `[module_id, layer, rank]` or
`[module_id, layer, rank, is_dora]`. The scaling alpha / rank is already in B. PEFT's files have the same rows
(`multilora_wire.peft_files`), which are read from the files into the pages piece by piece. They may have more: LoRA on
the embeddings and the head, and rows of tokens, which no row of `lora_config` can name.

Packed, the rows lie without their padding in pages of one fixed size, at the places that `multilora_wire.layout`
gives their pieces, so that any tier can hand out and take back pages without ever compacting. Each expert has a row of
its own. Where adapters are stored as codes, they become codes here, the B of a module of several sites by itself for
each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from multilora_client.base_weights import BaseWeights
from multilora_client.errors import AdapterError
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.layout import (
    DIGEST_BYTES,
    NO_TRAITS,
    AdapterTraits,
    PackedAdapter,
    PackedRow,
    TableEntries,
    own_pieces,
)
from multilora_engine.lora_config import ADAPTER_RANK_LIMIT
from multilora_kernels.adapter_codes import LANES, a_header_bytes, panel_bytes
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_wire.adapter_info import Kind
from multilora_wire.layout import ALIGNMENT_BYTES, AdapterLayout, PageShape, num_values, round_up
from multilora_wire.module_names import CROSS_DENSE, CROSS_QKV, UPSTREAM_NAMES
from multilora_wire.peft_config import PEFT_CONFIG_FILE, PeftError
from multilora_wire.peft_files import FoundRows, LinearReader, PeftAdapter, PeftLinear, PeftRows
from multilora_wire.pieces import Piece, part_bounds, part_offset
from multilora_wire.sites import EMBEDDING_LORA, HEAD_LORA, OUTER_LAYER, ROW_MODULES, ModelSites, WireModule

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ARENA_DTYPES = TORCH_DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
"""The dtypes in which the kernels see the pages, by `lora_dtype`; pairs of codes of 4 bits are bytes."""

_WRONG_MODEL = "The adapter was made for a model of other sizes, or the declared rank or module is wrong"

MAX_SAVED_BYTES = 64 << 20
"""Bytes of the rows that are kept of one saved copy of the embeddings or the head."""

_NUM_RANDOM, _PRIME = 1 << 20, 7919
"""The places at which the numbers of a random adapter begin: to draw all of its numbers would take seconds."""

_EXPERT_RANK = 4
"""Of a random adapter on experts, of which a layer may have hundreds."""

_INTEGERS = {2: torch.uint16, 4: torch.uint32}


def pack_adapter(
    weights: torch.Tensor, config: torch.Tensor, layout: AdapterLayout, traits: AdapterTraits = NO_TRAITS
) -> PackedAdapter:
    """Validate an adapter's wire tensors and pack them; everything kept is copied out of the inputs.

    weights: [rows, width], float16, bfloat16 or float32. config: [rows, 3 or 4], int32. traits: what the tensors do not
    tell.
    Raises InvalidRequest, naming row, module and layer with expected and actual numbers.
    """
    _check_shapes(weights, config)
    weights = weights.contiguous()
    bits, rows = _bits(weights), list[_Row]()
    for index, values in enumerate(config.tolist()):
        rows += _read_row(index, values, weights, bits, layout)
    return _pack(
        rows,
        lambda row: _wire_pieces(row, weights, bits, layout),
        layout,
        traits,
        lambda: _describe_non_finite(weights, rows, layout),
    )


def pack_peft(adapter: PeftAdapter, layout: AdapterLayout, base_model: Path, use: str = "") -> PackedAdapter:
    """Read PEFT's files into pages. The result is that of `pack_adapter` for the same adapter, converted.

    base_model: the checkpoint of the base model, which only DoRA and saved copies of embeddings and head are read with.
    use: of `AdapterTraits`.
    Beside the pages this takes 64 MiB at most. Raises InvalidRequest, naming module, key or field with expected and
    actual numbers.
    """
    linears = {(one.layer, one.module_id, one.expert): one for one in (*adapter.linears, *adapter.outer)}
    needs_base = any(linear.magnitude is not None for linear in linears.values())
    needs_base |= any(rows.saved is not None for rows in adapter.rows)

    def pieces_of(row: _Row) -> Iterator[_Values]:
        if row.tokens is not None:
            pieces = reader.read_rows(row.tokens, row.label)
        else:
            linear = linears[row.module.layer, row.module.module_id, row.expert]
            pieces = reader.read(linear, part_bounds(row.module))
        for one in pieces:
            yield _Values(one.index, one.first, _stored_values(_tensor(one.values), layout))

    try:
        reader = LinearReader(adapter, BaseWeights(base_model) if needs_base else None)
        rows = [_peft_row(linear, layout) for linear in (*adapter.linears, *adapter.outer)]
        rows += [row for one in adapter.rows if (row := _token_row(one, reader, layout)) is not None]
        if not rows:
            raise InvalidRequest("the adapter changes nothing: its copies are the base model's own weights")
        fault = f"the adapter holds values beyond the range of lora_dtype {layout.lora_dtype}"
        return _pack(rows, pieces_of, layout, _traits(adapter, layout, use), lambda: fault)
    except (PeftError, AdapterError) as error:
        raise InvalidRequest(str(error).replace(str(base_model), "the base model")) from None


def random_adapter(
    layout: AdapterLayout, rank: int, fits: Callable[[PageShape], bool], is_dora: bool = False
) -> PackedAdapter | None:
    """An adapter of random numbers on every linear of the layers, for checks: its updates are about half as large as
    what they are added to.

    rank: of plain linears; experts have a smaller one. is_dora: of those that may have it. Rank and pages are the
    largest up to that for which `fits` is true; None if there are none.
    """
    while True:
        rows = _random_rows(layout, rank, is_dora and layout.sites.has_dora)
        shape = layout.place(piece for row in rows for piece in row.pieces).shape
        if fits(shape) and shape.num_pages <= (layout.max_pages or shape.num_pages):
            break
        if rank == 1:
            return None
        rank //= 2
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randn(_NUM_RANDOM + max(row.num_values for row in rows), generator=generator)

    def values(row: _Row, count: int) -> torch.Tensor:
        # The prime spreads the rows over the numbers: no two have the same.
        start = (row.index * _PRIME + count) % _NUM_RANDOM
        return numbers[start : start + count]

    def pieces_of(row: _Row) -> Iterator[_Values]:
        module = row.module
        a = values(row, row.rank * module.in_size) * module.in_size**-0.5
        yield _Values(0, 0, _stored_values(a, layout))
        b = values(row, row.rank * module.out_size) * (0.5 * row.rank**-0.5)
        for start, end in pairwise(part_bounds(module)):
            yield _Values(1, start, _stored_values(b[start * row.rank : end * row.rank], layout))
        if row.is_dora:
            yield _Values(2, 0, _stored_values(1 + 0.1 * values(row, module.out_size), layout))

    return _pack(rows, pieces_of, layout, NO_TRAITS, lambda: "random numbers are finite")


def _random_rows(layout: AdapterLayout, rank: int, is_dora: bool) -> list[_Row]:
    rows: list[_Row] = []
    for module in layout.sites.plain_modules:
        has_experts = module.experts > 1
        own_rank = min(rank, _EXPERT_RANK) if has_experts else rank
        pieces = layout.pieces(module, own_rank, is_dora and not has_experts)
        for expert in range(module.experts):
            rows.append(
                _Row(module.name, len(rows), module, own_rank, is_dora and not has_experts, pieces, expert=expert)
            )
    return rows


def _token_row(rows: PeftRows, reader: LinearReader, layout: AdapterLayout) -> _Row | None:
    """None for a copy that equals the base's weight. Raises InvalidRequest if too many rows of a copy differ."""
    found = reader.find_rows(rows)
    count = len(found.token_ids)
    if not count:
        return None
    _check_enabled(rows.base_name, OUTER_LAYER, rows.module_id, layout)
    module = layout.sites.module_at[OUTER_LAYER, rows.module_id]
    pieces = layout.pieces(module, count, False)
    if rows.saved is not None and pieces[1].num_bytes > MAX_SAVED_BYTES:
        raise InvalidRequest(
            f"{rows.saved.key}: {count} of its {module.in_size} rows differ from the base model's and take "
            f"{pieces[1].num_bytes} bytes, {MAX_SAVED_BYTES} at most are kept of a copy; train rows of some tokens "
            "(PEFT's trainable_token_indices), or LoRA"
        )
    return _Row(module.name, 0, module, count, False, pieces, found)


def _traits(adapter: PeftAdapter, layout: AdapterLayout, use: str) -> AdapterTraits:
    """What the configuration says beside the matrices. Raises InvalidRequest."""
    tokens, outer = adapter.config.invocation_tokens, layout.sites.outer
    try:
        traits = AdapterTraits(invocation_tokens=tokens, rope=adapter.config.rope, use=use)
    except ValueError as error:
        raise InvalidRequest(f"{PEFT_CONFIG_FILE}: alora_invocation_tokens: {error}") from None
    if outer is not None and tokens and max(tokens) >= outer.vocab_size:
        raise InvalidRequest(
            f"{PEFT_CONFIG_FILE}: alora_invocation_tokens has {max(tokens)}, expected 0 .. {outer.vocab_size - 1}"
        )
    return traits


def _pack(
    rows: list[_Row],
    pieces_of: Callable[[_Row], Iterator[_Values]],
    layout: AdapterLayout,
    traits: AdapterTraits,
    describe_non_finite: Callable[[], str],
) -> PackedAdapter:
    """Lay rows into pages. pieces_of: the values of a row, in their order on the wire.

    An expert whose B is all zero gets no bytes, and A's of one layer's experts with equal bits are one A, whichever
    form the adapter came in. Both show when the values are read: then the adapter is packed once more without them.

    Raises InvalidRequest with the text of `describe_non_finite` for values that are not finite as they are stored.
    """
    rows = _sorted_rows(rows, layout)
    rows = [row for row in rows if not row.is_empty] or rows[:1]
    filled = _fill(rows, [row.a_key for row in rows], pieces_of, layout)
    if not layout.code_bits and not is_finite(filled.pages.view(TORCH_DTYPES[layout.lora_dtype])):
        raise InvalidRequest(describe_non_finite())
    if filled.can_shrink:
        # An adapter that changes nothing keeps a row, as a plain adapter whose B are zero keeps all of them.
        kept = [index for index, changes in enumerate(filled.changes) if changes] or [0]
        rows, a_keys = [rows[index] for index in kept], [filled.a_keys[index] for index in kept]
        del filled  # before other pages are made
        filled = _fill(rows, a_keys, pieces_of, layout)
    # The bits of ids may look like infinities.
    for row, place in zip(rows, filled.packed, strict=True):
        if row.tokens is not None:
            filled.store.put_ids(row.tokens.token_ids.astype(np.int32), place.a_offset)
    digest, entries = traits.digest(filled.store.digest(filled.packed)), TableEntries.of(filled.packed, layout)
    return PackedAdapter(digest, filled.packed, filled.pages, traits, entries)


@dataclass(frozen=True, eq=False)
class _Filled:
    """Rows in pages.

    changes: of each row, whether it changes answers. a_keys: of each row, equal where A is equal; None where A is the
    row's alone.
    can_shrink: whether a row changes nothing, or rows have an equal A and different places for it.
    """

    packed: list[PackedRow]
    pages: torch.Tensor
    store: _FloatStore | _CodeStore
    changes: list[bool]
    a_keys: list[Hashable]
    can_shrink: bool


def _fill(
    rows: Sequence[_Row],
    a_keys: Sequence[Hashable],
    pieces_of: Callable[[_Row], Iterator[_Values]],
    layout: AdapterLayout,
) -> _Filled:
    """a_keys: of each row; rows with an equal key are known to have the same A, and get one place for it."""
    owners = _owners(a_keys)
    placement = layout.place(
        piece for index, row in enumerate(rows) for piece in row.pieces[0 if owners[index] == index else 1 :]
    )
    check_size(len(placement.fill), layout)
    packed = _packed_rows(rows, owners, iter(placement.offsets))
    # NumPy asks the system for huge pages: with small ones, finding the memory takes longer than filling it.
    pages = torch.from_numpy(np.empty((len(placement.fill), layout.page_bytes), dtype=np.uint8))
    memory = pages.view(-1).numpy()
    for page, used in zip(pages, placement.fill, strict=True):
        page[used:].zero_()
    store = _CodeStore(pages, layout) if layout.code_bits else _FloatStore(pages, layout)
    changes, found_keys = [True] * len(rows), list[Hashable](a_keys)
    for index, (row, place) in enumerate(zip(rows, packed, strict=True)):
        store.begin(row, owners[index])
        seen = _Seen() if row.module.experts > 1 else None
        for values in pieces_of(row):
            if seen is not None:
                seen.take(values)
            if values.index or owners[index] == index:
                store.put(row, place.offsets[values.index], values)
        if seen is not None:
            changes[index] = seen.has_b
            found_keys[index] = (row.module.layer, row.rank, row.module.in_size, seen.a.digest())
        for piece, offset in zip(row.pieces, place.offsets, strict=True):
            memory[offset + piece.num_bytes : offset + round_up(piece.num_bytes, ALIGNMENT_BYTES)] = 0
        if row.tokens is not None:
            memory[place.a_offset : place.a_offset + row.pieces[0].num_bytes] = 0
    can_shrink = not all(changes) or _owners(found_keys) != owners
    return _Filled(packed, pages, store, changes, found_keys, can_shrink)


class _Seen:
    """What the values of an expert's row tell: a digest of A, and whether B changes anything."""

    def __init__(self) -> None:
        self.a = blake3()
        self.has_b = False

    def take(self, given: _Values) -> None:
        if given.index == 0:
            self.a.update(given.values.view(np.uint8).data)
        elif not self.has_b:
            is_bits = given.values.dtype.kind == "u"  # Of floats, whose highest bit is the sign: zero has two signs.
            self.has_b = bool((given.values << 1 if is_bits else given.values).any())


def _owners(a_keys: Sequence[Hashable]) -> list[int]:
    """Of each row the first row that has the same A."""
    first: dict[Hashable, int] = {}
    return [index if key is None else first.setdefault(key, index) for index, key in enumerate(a_keys)]


def _packed_rows(rows: Sequence[_Row], owners: Sequence[int], offsets: Iterator[int]) -> list[PackedRow]:
    """owners: of each row, the row that has its A. offsets: of all pieces."""
    packed: list[PackedRow] = []
    for index, (row, owner) in enumerate(zip(rows, owners, strict=True)):
        a_offset = next(offsets) if owner == index else packed[owner].a_offset
        b_offset = next(offsets)
        magnitude_offset = next(offsets) if row.is_dora else -1
        module = row.module
        packed.append(
            PackedRow(module.module_id, module.layer, row.rank, a_offset, b_offset, magnitude_offset, row.expert)
        )
    return packed


def ranks_of(rows: Iterable[PackedRow]) -> tuple[int, ...]:
    """The different ranks, ascending."""
    return tuple(sorted({row.rank for row in rows if not row.is_tokens}))


def kinds_of(rows: Sequence[PackedRow], traits: AdapterTraits) -> tuple[Kind, ...]:
    """What an adapter has, for people."""
    module_ids = {row.module_id for row in rows}
    has: Mapping[Kind, bool] = {
        "LoRA": any(row.layer != OUTER_LAYER and not row.is_dora for row in rows),
        "DoRA": any(row.is_dora for row in rows),
        "embeddings": EMBEDDING_LORA in module_ids,
        "head": HEAD_LORA in module_ids,
        "tokens": not module_ids.isdisjoint(ROW_MODULES),
        "activated": bool(traits.invocation_tokens),
        "rope": bool(traits.rope),
        "use": bool(traits.use),
    }
    return tuple(kind for kind, is_there in has.items() if is_there)


def check_rows(rows: Sequence[PackedRow], num_pages: int, layout: AdapterLayout) -> None:
    """Whether stored rows fit the model and lie where packing puts them. Raises ValueError."""
    if not rows:
        raise ValueError("there are no rows")
    for row in rows:
        module = layout.sites.module_at.get((row.layer, row.module_id))
        if module is None or not _fits(row, module, layout):
            raise ValueError(f"{row} does not fit the model")
        if names := _ruled_out(module, layout):
            raise ValueError(f"{row} adapts {names}, which the checkpoint rules out")
        if row.magnitude_offset < -1:
            raise ValueError(f"{row} does not lie where packing puts it")
    offsets, pieces = zip(*own_pieces(rows, layout), strict=True)
    placement = layout.place(pieces)
    if placement.offsets != list(offsets):
        wrong = {offset for offset, right in zip(offsets, placement.offsets, strict=True) if offset != right}
        row = next(row for row in rows if wrong.intersection(row.offsets))
        raise ValueError(f"{row} does not lie where packing puts it")
    if len(placement.fill) != num_pages:
        raise ValueError(f"the rows take {len(placement.fill)} pages, not {num_pages}")


def _fits(row: PackedRow, module: WireModule, layout: AdapterLayout) -> bool:
    """Whether a row may be one of this module."""
    is_dora_possible = module.experts == 1 and not row.is_tokens
    largest_rank = module.in_size if row.is_tokens else layout.max_rank  # of rows of tokens: all tokens
    is_placed = 1 <= row.rank <= largest_rank and 0 <= row.expert < module.experts
    return is_placed and (is_dora_possible or not row.is_dora)


@dataclass(frozen=True)
class _Row:
    """A validated row of an adapter, or the part of it that is one expert's. label: for messages. index: its place in
    the form that came.

    tokens: of rows of tokens; `rank` is their number.
    a_key: rows with an equal key have the same A, as far as that is known before the values are read.
    is_empty: whether it is known before that B is all zero.
    """

    label: str
    index: int
    module: WireModule
    rank: int
    is_dora: bool
    pieces: list[Piece]
    tokens: FoundRows | None = None
    expert: int = 0
    a_key: Hashable = None
    is_empty: bool = False

    @property
    def num_values(self) -> int:
        """Values of the row, without padding."""
        return num_values(self.module, self.rank, self.is_dora)

    def columns(self, index: int) -> int:
        """The columns of A, of B, or of the magnitude; index 1 of rows of tokens is the rows."""
        if self.tokens is not None:
            return self.module.out_size
        return (self.rank if self.module.kind == "embedding" else self.module.in_size, self.rank, 1)[index]

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class _Values:
    """Rows of a piece, from row `first` on. index: 0 is A, 1 is B, 2 is the magnitude.

    values: flat, as `_stored_values` gives them. Rows of B that become codes are of one part of the module, and begin
    at a multiple of 16 of the part's.
    """

    index: int
    first: int
    values: npt.NDArray[Any]


def _check_shapes(weights: torch.Tensor, config: torch.Tensor) -> None:
    if weights.dim() != 2 or weights.shape[0] == 0:
        raise InvalidRequest(f"Invalid shape for lora_weights tensor: {list(weights.shape)}, expected [rows, width]")
    if config.dim() != 2 or config.shape[1] not in (3, 4):
        raise InvalidRequest(f"Invalid shape for lora_config tensor: {list(config.shape)}, expected [rows, 3 or 4]")
    if config.shape[0] != weights.shape[0]:
        raise InvalidRequest(
            f"lora_weights has {weights.shape[0]} rows and lora_config {config.shape[0]}; each row needs both"
        )


def _sorted_rows(rows: Iterable[_Row], layout: AdapterLayout) -> list[_Row]:
    """The rows by layer, module and expert. Raises InvalidRequest if two write the same site."""
    rows = sorted(rows, key=lambda row: (row.module.layer, row.module.module_id, row.expert))
    owner: dict[int, _Row] = {}
    for row in rows:
        for part in row.module.parts:
            other = owner.setdefault(part.column + row.expert, row)
            if other is not row:
                name = layout.sites.site_at[part.column].name
                name += f" of expert {row.expert}" if row.module.experts > 1 else ""
                raise InvalidRequest(f"{row} and {other} both adapt {name}; send each once")
    return rows


def _read_row(
    index: int, values: list[int], weights: torch.Tensor, bits: npt.NDArray[Any], layout: AdapterLayout
) -> list[_Row]:
    """A row of `lora_config`, as the rows of each expert. bits: the bits of `weights`."""
    where, rank = f"lora_config row {index}", values[2]
    if values[0] < 0:
        raise _unknown_module(where, values[0], values[1], layout)
    module = _check_module(where, values[0], values[1], layout)
    check_rank(where, rank, layout)
    if len(values) == 4 and values[3] not in (0, 1):
        raise InvalidRequest(f"{where}: is_dora must be 0 or 1, it is {values[3]}")
    is_dora = len(values) == 4 and values[3] == 1
    row = _Row(
        f"{where} ({module.name}, layer {module.layer}, rank {rank})",
        index,
        module,
        rank,
        is_dora,
        layout.pieces(module, rank, is_dora),
    )
    _check_dora(row.label, module, is_dora)
    if (count := row.num_values) > (width := weights.shape[1]):
        each = f" for each of {module.experts} experts" if module.experts > 1 else ""
        raise InvalidRequest(
            f"{row}: lora_weights has to few values for {module.name}: its A is [{rank}, {module.in_size}] and its B "
            f"[{module.out_size}, {rank}] here{each}, {count} values needed, the rows hold {width}. {_WRONG_MODEL}"
        )
    if bits[index, count:].max(initial=0) and weights[index, count:].any():  # a zero may be negative
        raise InvalidRequest(
            f"{row}: lora_weights holds values other than zero beyond the {count} that its module and rank account "
            f"for. {_WRONG_MODEL}"
        )
    if (layout.code_bits or module.experts > 1) and not is_finite(weights[index, :count]):
        raise InvalidRequest(_describe_non_finite(weights, [row], layout))
    if module.experts == 1:
        return [row]
    all_b = bits[index, module.experts * rank * module.in_size : count].reshape(module.experts, -1)
    is_empty = ~(all_b << 1).any(axis=1)  # without the highest bit, the sign: zero has two
    return [replace(row, expert=expert, is_empty=bool(is_empty[expert])) for expert in range(module.experts)]


def _peft_row(linear: PeftLinear, layout: AdapterLayout) -> _Row:
    if linear.layer == OUTER_LAYER:
        module = _check_outer_module(linear.name, linear.module_id, layout)
    else:
        module = _check_module(linear.name, linear.module_id, linear.layer, layout)
    check_rank(linear.a.place.key, linear.rank, layout)
    is_dora = linear.magnitude is not None
    _check_dora(linear.name, module, is_dora)
    if is_dora and not layout.sites.has_dora:
        raise InvalidRequest(
            f"{linear.name}: DoRA is not supported for this model, whose checkpoint has linears transposed; train LoRA"
        )
    if not 0 <= linear.expert < module.experts:
        raise InvalidRequest(f"{linear.name}: expert {linear.expert}, and the model has {module.experts} in this layer")
    a_key = (linear.layer, linear.a) if module.experts > 1 else None
    pieces = layout.pieces(module, linear.rank, is_dora)
    return _Row(linear.name, 0, module, linear.rank, is_dora, pieces, expert=linear.expert, a_key=a_key)


def _check_dora(where: str, module: WireModule, is_dora: bool) -> None:
    if is_dora and module.experts > 1:
        raise InvalidRequest(
            f"{where}: DoRA on experts ({module.name}) is not supported; train the experts without use_dora"
        )


def check_rank(where: str, rank: int, layout: AdapterLayout) -> None:
    """Raises InvalidRequest for a rank that this server does not accept. where: what has it."""
    if rank <= 0:
        raise InvalidRequest(f"{where}: Expected adapterSize to be > 0, it is {rank}")
    if rank > layout.max_rank:
        raise InvalidRequest(
            f"{where}: Invalid low_rank ({rank}). low_rank must be <= max_lora_rank ({layout.max_rank}); "
            f"{_rank_advice(rank)}"
        )


def check_size(num_pages: int, layout: AdapterLayout) -> None:
    """Raises InvalidRequest for an adapter that the server's tiers cannot hold, before memory is taken for it."""
    if layout.max_pages and num_pages > layout.max_pages:
        raise InvalidRequest(
            f"the adapter takes {num_pages * layout.page_bytes} bytes, and this server has room for adapters of "
            f"{layout.max_pages * layout.page_bytes}: train a smaller rank or fewer modules, or start the server with "
            "more lora_cache_host_memory_bytes (on a GPU also lora_cache_gpu_memory_fraction)"
        )


def _rank_advice(rank: int) -> str:
    if rank <= ADAPTER_RANK_LIMIT:
        return f"start the server with --set max_lora_rank={rank}"
    return f"{ADAPTER_RANK_LIMIT} is the most that a server can be started with"


def _check_outer_module(name: str, module_id: int, layout: AdapterLayout) -> WireModule:
    """name: of the embeddings or the head, which the adapter changes. Raises InvalidRequest."""
    _check_enabled(name, OUTER_LAYER, module_id, layout)
    module = layout.sites.module_at[OUTER_LAYER, module_id]
    if names := _ruled_out(module, layout):
        raise InvalidRequest(
            f"{name}: the adapter adapts {names}, ruled out by lora_compatible or lora_target_modules of the checkpoint"
        )
    return module


def _check_module(where: str, module_id: int, layer: int, layout: AdapterLayout) -> WireModule:
    """The module of a layer. Raises InvalidRequest for one that the model has not, or that nobody may change."""
    sites = layout.sites
    _check_enabled(where, layer, module_id, layout)
    if module_id not in sites.module_names:
        raise _unknown_module(where, module_id, layer, layout)
    if not 0 <= layer < sites.num_layers:
        raise InvalidRequest(
            f"{where}: Expected layerId to be in the range [0, numModelLayers): {layer}, numModelLayers is "
            f"{sites.num_layers}{_describe_stacks(sites)}"
        )
    module = sites.module_at.get((layer, module_id))
    if module is None:
        raise InvalidRequest(
            f"{where}: lora module {module_id} ({sites.module_names[module_id]}) not enabled for layer {layer}"
            f"{_describe_stacks(sites)}"
        )
    if names := _ruled_out(module, layout):
        raise InvalidRequest(
            f"{where}: lora module {module_id} ({module.name}) of layer {layer} adapts {names}, ruled out by "
            "lora_compatible or lora_target_modules of the checkpoint"
        )
    return module


def _describe_stacks(sites: ModelSites) -> str:
    """The numbers of layers of an encoder-decoder model, for errors; "" for a decoder alone."""
    if not sites.has_encoder:
        return ""
    decoder, encoder = sites.stacks
    last = sites.num_layers - 1
    return f"; layers 0 to {encoder.first - 1} are {decoder.name}, {encoder.first} to {last} {encoder.name}"


def _check_enabled(where: str, layer: int, module_id: int, layout: AdapterLayout) -> None:
    """Raises InvalidRequest for a module that the server's parameter leaves out."""
    left_out = layout.sites.left_out_at.get((layer, module_id))
    if left_out is not None:
        place = "" if layer == OUTER_LAYER else f" (id {module_id}, layer {layer})"
        raise InvalidRequest(
            f"{where}: lora module {left_out.name} not enabled for this model{place}: lora_target_modules of the "
            f"server has {', '.join(layout.sites.target_names)}"
        )


def _unknown_module(where: str, module_id: int, layer: int, layout: AdapterLayout) -> InvalidRequest:
    """The error about an id that no wire module of the model has."""
    names = layout.sites.module_names.items()
    known = ", ".join(f"{number} {name}" for number, name in names if number >= 0) or "no module with an id"
    needs = f"{UPSTREAM_NAMES[module_id]} needs an encoder, and " if CROSS_QKV <= module_id <= CROSS_DENSE else ""
    return InvalidRequest(
        f"{where}: lora module {module_id} not enabled for this model; {needs}it has {known}, and layer {layer} was "
        "meant"
    )


def _ruled_out(module: WireModule, layout: AdapterLayout) -> str:
    """The sites of a module that the checkpoint leaves to no adapter; "" where there are none."""
    if not layout.ruled_out:
        return ""
    names = [layout.sites.site_at[part.column].name for part in module.parts]
    return ", ".join(name for name in names if name in layout.ruled_out)


def _wire_pieces(row: _Row, weights: torch.Tensor, bits: npt.NDArray[Any], layout: AdapterLayout) -> Iterator[_Values]:
    """The values of a row of `lora_weights`, or of one of its experts. bits: the bits of `weights`."""
    module, rank, expert = row.module, row.rank, row.expert
    num_a, num_b = rank * module.in_size, rank * module.out_size
    is_stored_so = TORCH_DTYPES.get(layout.lora_dtype) == weights.dtype

    def stored(first: int, stop: int) -> npt.NDArray[Any]:
        return bits[row.index, first:stop] if is_stored_so else _stored_values(weights[row.index, first:stop], layout)

    if module.experts == 1:
        whole = stored(0, row.num_values)
        a, b, magnitude = whole[:num_a], whole[num_a : num_a + num_b], whole[num_a + num_b :]
    else:
        b_start = module.experts * num_a + expert * num_b
        a, b, magnitude = stored(expert * num_a, (expert + 1) * num_a), stored(b_start, b_start + num_b), bits[0, :0]
    yield _Values(0, 0, a)
    bounds = part_bounds(module) if layout.code_bits else (0, module.out_size)
    for start, end in pairwise(bounds):
        yield _Values(1, start, b[start * rank : end * rank])
    if row.is_dora:
        yield _Values(2, 0, magnitude)


def _stored_values(values: torch.Tensor, layout: AdapterLayout) -> npt.NDArray[Any]:
    """Values in a flat array: the bits of the dtype in which they are stored, or float32 where they become codes."""
    if layout.code_bits:
        return values.float().numpy().reshape(-1)
    return _bits(values.to(TORCH_DTYPES[layout.lora_dtype])).reshape(-1)


def _tensor(values: npt.NDArray[Any]) -> torch.Tensor:
    """Values as `LinearReader` gives them, which has the bits of bfloat16 in uint16."""
    if values.dtype == np.uint16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


class _FloatStore:
    """Stores values as floats. Bits are copied, by NumPy: a small copy costs torch several times as much."""

    def __init__(self, pages: torch.Tensor, layout: AdapterLayout) -> None:
        self._pages = pages
        self._dtype = layout.lora_dtype
        self._bits = _bits(pages.view(TORCH_DTYPES[layout.lora_dtype])).reshape(-1)

    def begin(self, row: _Row, a_owner: int) -> None:
        """Floats have no start of a row."""

    def put(self, row: _Row, offset: int, given: _Values) -> None:
        """offset: of the piece, in bytes."""
        first = offset // self._bits.itemsize + given.first * row.columns(given.index)
        self._bits[first : first + len(given.values)] = given.values

    def put_ids(self, token_ids: npt.NDArray[np.int32], offset: int) -> None:
        """Ids of tokens, ascending."""
        stored = token_ids.view(np.uint8)
        self._pages.view(-1).numpy()[offset : offset + len(stored)] = stored

    def digest(self, rows: Sequence[PackedRow]) -> str:
        return content_digest(rows, self._pages, self._dtype)


class _CodeStore:
    """Stores values as codes; its digest is of the values as they came."""

    def __init__(self, pages: torch.Tensor, layout: AdapterLayout) -> None:
        self._target = pages.view(-1)
        self._layout = layout
        self._arena = ARENA_DTYPES[layout.lora_dtype]
        self._digest = blake3(b"sent")

    def begin(self, row: _Row, a_owner: int) -> None:
        """a_owner: the index of the row that has the A of this one."""
        module = row.module
        header = [module.module_id, module.layer, row.rank, row.is_dora]
        header += [row.expert, a_owner] if module.experts > 1 else []
        self._digest.update(np.array(header, np.int64).tobytes())

    def put(self, row: _Row, offset: int, given: _Values) -> None:
        self._digest.update(given.values.view(np.uint8).data)
        values = torch.from_numpy(given.values).view(-1, row.columns(given.index))
        if row.tokens is not None or given.index == 2:
            self._store(offset + 4 * given.first * values.shape[1], values.view(torch.uint8).flatten())
        elif row.module.kind == "embedding":
            start = given.first // LANES * panel_bytes(row.rank, self._layout.code_bits)
            self._store(offset + start, quantize_b(values, self._arena))
        elif given.index == 1:
            self._store(offset + self._b_offset(row, given.first), quantize_b(values, self._arena))
        else:
            self._put_a(row, offset, given.first, quantize_a(values, self._arena), len(values))

    def digest(self, rows: Sequence[PackedRow]) -> str:
        return self._digest.hexdigest(DIGEST_BYTES)

    def put_ids(self, token_ids: npt.NDArray[np.int32], offset: int) -> None:
        """Ids of tokens, ascending."""
        stored = token_ids.view(np.uint8)
        self._digest.update(stored.data)
        self._store(offset, torch.from_numpy(stored))

    def _put_a(self, row: _Row, offset: int, first: int, codes: torch.Tensor, count: int) -> None:
        """Codes of 8 bits of A have the scales of all rows before them."""
        if self._layout.code_bits == 8:
            self._store(offset + 4 * first, codes[: 4 * count])
            if first == 0:
                end = a_header_bytes(row.rank)
                self._target[offset + 4 * row.rank : offset + end] = 0
            offset, codes = offset + a_header_bytes(row.rank), codes[a_header_bytes(count) :]
        self._store(offset + first * (len(codes) // count), codes)

    def _b_offset(self, row: _Row, first: int) -> int:
        """Bytes of B before a row at which a panel begins."""
        bounds = part_bounds(row.module)
        index = max(index for index, start in enumerate(bounds[:-1]) if start <= first)
        start = part_offset(row.module, index, row.rank, self._layout.lora_dtype)
        return start + (first - bounds[index]) // LANES * panel_bytes(row.rank, self._layout.code_bits)

    def _store(self, start: int, stored: torch.Tensor) -> None:
        self._target[start : start + len(stored)] = stored


def content_digest(rows: Sequence[PackedRow], pages: Iterable[torch.Tensor], lora_dtype: str) -> str:
    """32 hex digits (BLAKE3, cut) over an adapter's rows and pages, without its traits; the GIL is free meanwhile.

    Offsets count in elements of the arena, as in every earlier layout, so that digests outlive layouts. An adapter of
    no experts has the digest of a time that knew none.
    """
    itemsize = ARENA_DTYPES[lora_dtype].itemsize
    header = np.array([(r.module_id, r.layer, r.rank, *(o // itemsize for o in _all_offsets(r))) for r in rows])
    digest = blake3(lora_dtype.encode())
    digest.update(header.astype(np.int64).tobytes())
    if any(row.expert for row in rows):
        digest.update(b"experts" + np.array([row.expert for row in rows], np.int64).tobytes())
    for page in pages:
        digest.update(page.numpy().data)
    return digest.hexdigest(DIGEST_BYTES)


def _all_offsets(row: PackedRow) -> tuple[int, int, int]:
    return row.a_offset, row.b_offset, row.magnitude_offset


def _bits(values: torch.Tensor) -> npt.NDArray[Any]:
    """The same memory as unsigned integers: NumPy has no bfloat16, and finds their largest at memory speed."""
    return values.view(_INTEGERS[values.itemsize]).numpy()


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are finite, by their bits: as integers, infinities and NaNs are the largest of their sign.

    Positive ones are the largest signed integers, negative ones the largest unsigned.
    """
    bits, infinity = _bits(values), torch.tensor(torch.inf, dtype=values.dtype)
    signed = bits.view(f"i{values.itemsize}")
    return bool(signed.max() < _bits(infinity) and bits.max() < _bits(-infinity))


def _describe_non_finite(weights: torch.Tensor, rows: Sequence[_Row], layout: AdapterLayout) -> str:
    """The message about an adapter that was packed into values that are not finite."""
    places = torch.nonzero(~torch.isfinite(weights))
    if len(places) == 0:
        return f"lora_weights holds values beyond the range of lora_dtype {layout.lora_dtype}"
    index, column = places[0].tolist()
    row = next(row for row in rows if row.index == index)
    return (
        f"{row}: lora_weights holds {weights[index, column].item()} at position {column}; only finite values are legal"
    )
