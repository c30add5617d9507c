"""The memory that adapters take in a server, from its layout or from a checkpoint without a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from multilora_client.base_weights import MODEL_CONFIG_FILE
from multilora_client.errors import InvalidRequest
from multilora_wire.config_sites import config_sites
from multilora_wire.layout import AdapterLayout, PageShape, adapter_layout, adapter_pages, header_pages, uniform_pieces
from multilora_wire.pieces import StoredDtype
from multilora_wire.sites import EMBEDDING_ROWS, ModelSites, WireModule


def read_layout(checkpoint: Path, max_rank: int, lora_dtype: StoredDtype) -> AdapterLayout:
    """The layout of a Hugging Face checkpoint, from its `config.json`. Raises InvalidRequest."""
    return adapter_layout(read_sites(checkpoint), max_rank, lora_dtype)


def read_sites(checkpoint: Path) -> ModelSites:
    """The sites of a Hugging Face checkpoint, from its `config.json`. Raises InvalidRequest.

    For a model of several kinds of input: the sites of its text part.
    """
    path = checkpoint / MODEL_CONFIG_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return config_sites(fields.get("text_config") or fields)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise InvalidRequest(f"{path} does not describe a model that is served: {error}") from error


def tier_bytes(layout: AdapterLayout, num_adapters: int, num_pages: int) -> tuple[int, int]:
    """The bytes of a host tier and of a disk tier for adapters with a given number of pages each.

    Never fewer than a server starts with: room for one adapter of the largest rank that it accepts.
    """
    least = adapter_pages(layout, layout.max_rank, is_dora=True)
    header = header_pages(layout)
    host, disk = max(num_adapters * num_pages, least), max(num_adapters * (num_pages + header), least + header)
    return host * layout.page_bytes, disk * layout.page_bytes


def linear_names(layout: AdapterLayout) -> list[str]:
    """Names within a layer of the linears that adapters may change, such as `q_proj` and `experts.up_proj`, in the
    order of columns; then the embeddings and the head.
    """
    site_at, modules = layout.sites.site_at, _single_modules(layout)
    columns = sorted({module.parts[0].column for module in modules})
    return list(dict.fromkeys(_short_name(site_at[column].name) for column in columns))


def choose_linears(layout: AdapterLayout, names: str) -> list[WireModule]:
    """`q,v,lm_head` or `q_proj,v_proj,lm_head` -> the modules of these linears in every layer, and the head.

    Raises InvalidRequest.
    """
    wanted, known = names.split(","), linear_names(layout)
    shorter = {name.removesuffix("_proj"): name for name in known}  # `gate` of experts is their router's own name
    chosen = {name if name in known else shorter.get(name) for name in wanted}
    if None in chosen or len(chosen) != len(wanted):
        raise InvalidRequest(f"--linears is {names!r}; write some of {','.join(known)}, each once")
    site_at = layout.sites.site_at
    return [m for m in _single_modules(layout) if _short_name(site_at[m.parts[0].column].name) in chosen]


def _single_modules(layout: AdapterLayout) -> list[WireModule]:
    """The modules of one linear each, also outside the layers."""
    return [module for module in (*layout.sites.plain_modules, *layout.sites.outer_modules) if module.parts]


def token_rows_shape(
    layout: AdapterLayout, rank: int, is_dora: bool, modules: Iterable[WireModule], num_tokens: int
) -> PageShape:
    """The pages of an adapter of one rank on `modules` that also has rows of tokens. Raises InvalidRequest."""
    pieces = uniform_pieces(modules, rank, is_dora, layout.lora_dtype)
    if num_tokens:
        row_modules = [module for module in layout.sites.outer_modules if module.module_id == EMBEDDING_ROWS]
        if not row_modules:
            raise InvalidRequest("the server does not tell the size of its vocabulary, which rows of tokens need")
        if num_tokens > (vocab_size := row_modules[0].in_size):
            raise InvalidRequest(f"--tokens is {num_tokens}, and the vocabulary has {vocab_size} tokens")
        pieces += layout.pieces(row_modules[0], num_tokens, False)
    return layout.place(pieces).shape


def _short_name(site_name: str) -> str:
    """`layers.3.mlp.experts.up_proj` -> `experts.up_proj`: without layer, attention and MLP. Self and cross attention
    have the same names then, as in PEFT's `target_modules`.
    """
    return re.sub(r"^layers\.[0-9]+\.((self_attn|encoder_attn|mlp|layer\.[0-9]\.\w+)\.)?", "", site_name)
