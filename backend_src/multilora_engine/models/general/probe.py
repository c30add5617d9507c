"""Our attention beside transformers' own, once at the load: the same modules with the same weights must give the same.

The tokens of two sequences lie side by side, in pieces and in blocks that are not in order. So a module that mixes the
tokens of a step in another way than by attention shows itself, too.
"""

from __future__ import annotations

import logging
from itertools import accumulate

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache
from multilora_engine.errors import ConfigError
from multilora_engine.models.general.model import GeneralModel
from multilora_engine.models.general.tree import EAGER, PAGED, set_attention
from multilora_engine.models.model import Model, only_group
from multilora_engine.out_of_memory import is_out_of_memory

_LENGTHS = (23, 18)
"""Tokens of the sequences."""
_PIECES = ((9, 1), (13, 17), (1, 0))
"""Tokens of each sequence in each step; the last step decodes. A step takes the sequences in order."""
_BLOCK_SIZE = 4
_PRIME = 7919
"""Spreads tokens over the vocabulary."""

_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}
"""The largest difference of logits, as a share of the largest logit."""

_logger = logging.getLogger(__name__)


@torch.inference_mode()
def check_attention(model: Model) -> None:
    """Raises ConfigError, with its size, where the logits differ by more than rounding."""
    assert isinstance(model, GeneralModel)
    device = model.device
    tokens = [
        (torch.arange(length, device=device) + 1 + start) * _PRIME % model.config.vocab_size
        for start, length in enumerate(_LENGTHS)
    ]
    try:
        expected, actual = _by_transformers(model, tokens), _by_ours(model, tokens)
    except Exception as error:  # whatever its modules raise
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{model.config.architecture} is not served: its modules do not run with linears of the engine: "
            f"{type(error).__name__}: {error}"
        ) from error
    largest = expected.abs().max().item()
    difference = (actual - expected).abs().max().item() / largest if largest else 0.0
    if not difference <= _TOLERANCES[model.dtype]:  # so that a NaN is an error, too
        raise ConfigError(
            f"{model.config.architecture} is not served: over {sum(_LENGTHS)} tokens the engine's attention gives "
            f"other logits than transformers' own: the largest difference is {difference:.2g} of the largest logit, "
            f"{_TOLERANCES[model.dtype]:g} is allowed"
        )
    _logger.info(
        "%s is computed by transformers' modules: over %d tokens its logits differ from transformers' own attention by "
        "%.1e of the largest",
        model.config.architecture,
        sum(_LENGTHS),
        difference,
    )


def _by_transformers(model: GeneralModel, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Logits of all tokens, one sequence after another. The modules count the positions themselves."""
    set_attention(model.tree, EAGER)
    try:
        rows = torch.cat([model.run_body(ids) for ids in tokens])
    finally:
        set_attention(model.tree, PAGED)
    return model.logits((rows, rows), torch.arange(len(rows), device=rows.device), None)


def _by_ours(model: GeneralModel, tokens: list[torch.Tensor]) -> torch.Tensor:
    group = only_group(model.kv_groups)
    num_blocks = sum(-(-length // _BLOCK_SIZE) for length in _LENGTHS)
    shape, device = group.cache_shape(num_blocks * _BLOCK_SIZE, model.dtype), tokens[0].device
    cache = KVCache(*(torch.full(shape, torch.nan, dtype=model.dtype, device=device) for _ in range(2)))
    blocks = torch.arange(num_blocks, device=device).flip(0)
    tables = blocks.split([-(-length // _BLOCK_SIZE) for length in _LENGTHS])
    block_tables = torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True, padding_value=-1)
    logits: list[list[torch.Tensor]] = [[] for _ in _LENGTHS]
    done = [0] * len(_LENGTHS)
    for lens in _PIECES:
        batch = _batch(tokens, done, list(lens), block_tables)
        for sequence, piece in zip(
            _taken(lens), model.forward(batch, cache).split([n for n in lens if n]), strict=True
        ):
            logits[sequence].append(piece)
        done = [start + n for start, n in zip(done, lens, strict=True)]
    assert done == list(_LENGTHS)
    return torch.cat([piece for pieces in logits for piece in pieces])


def _taken(lens: tuple[int, ...] | list[int]) -> list[int]:
    return [sequence for sequence, n in enumerate(lens) if n]


def _batch(tokens: list[torch.Tensor], done: list[int], lens: list[int], block_tables: torch.Tensor) -> ForwardBatch:
    """A step of the next `lens` tokens of each sequence; all rows of logits are wanted."""
    taken, device = _taken(lens), tokens[0].device
    positions = [torch.arange(done[s], done[s] + lens[s], device=device) for s in taken]
    slots = [
        block_tables[s][p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE for s, p in zip(taken, positions, strict=True)
    ]
    query_lens = [lens[s] for s in taken]
    context_lens = [done[s] + lens[s] for s in taken]
    return ForwardBatch(
        input_ids=torch.cat([tokens[s][p] for s, p in zip(taken, positions, strict=True)]),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        query_lens=query_lens,
        context_lens=context_lens,
        num_keys=torch.tensor(context_lens, device=device),
        query_starts=torch.tensor([0, *accumulate(query_lens)], device=device),
        block_tables=block_tables[taken],
        num_decodes=1 if query_lens == [1] else 0,
        logits_indices=torch.arange(sum(query_lens), device=device),
        block_size=_BLOCK_SIZE,
    )
