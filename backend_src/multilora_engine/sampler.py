"""The next token of every sequence of a step, in one vectorised call over mixed parameters."""

from __future__ import annotations

import torch

from multilora_engine.request import Sequence


def sample(logits: torch.Tensor, sequences: list[Sequence], end_token_ids: tuple[int, ...]) -> list[int]:
    """Choose one token per sequence. logits: [len(sequences), vocab], float32, changed in place.

    A sequence draws one uniform number a token from its own generator, so that what it draws does not depend on who
    else is in the batch.
    """
    _forbid_early_end(logits, sequences, end_token_ids)
    token_ids = logits.argmax(dim=-1)
    rows = [row for row, sequence in enumerate(sequences) if not sequence.request.sampling.is_greedy]
    if rows:
        token_ids[rows] = _draw(logits[rows], [sequences[row] for row in rows])
    return [int(token_id) for token_id in token_ids.tolist()]


def _forbid_early_end(logits: torch.Tensor, sequences: list[Sequence], end_token_ids: tuple[int, ...]) -> None:
    for row, sequence in enumerate(sequences):
        if len(sequence.output_token_ids) < sequence.request.sampling.min_tokens:
            logits[row, list(end_tokens(sequence, end_token_ids))] = -torch.inf


def end_tokens(sequence: Sequence, end_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end a sequence: the checkpoint's, the request's own, or none for end_id -1."""
    end_id = sequence.request.sampling.end_id
    if end_id is None:
        return end_token_ids
    return () if end_id < 0 else (end_id,)


def _draw(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Inverse-CDF sampling over the tokens that temperature, top_k and top_p leave, most probable first.

    top_k keeps the k most probable tokens, top_p of these the smallest set whose probability reaches top_p (the most
    probable one always stays).
    """
    parameters = [sequence.request.sampling for sequence in sequences]
    vocab = logits.shape[1]
    temperature = _column([p.temperature for p in parameters], logits)
    top_k = _column([p.top_k or vocab for p in parameters], logits)
    top_p = _column([p.top_p for p in parameters], logits)
    uniform = _column([sequence.random.random() for sequence in sequences], logits)

    ordered, order = (logits / temperature).sort(dim=-1, descending=True)
    position = torch.arange(vocab, device=logits.device)
    probabilities = ordered.masked_fill(position >= top_k, -torch.inf).softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    kept = probabilities * (cumulative - probabilities < top_p)
    cumulative = kept.cumsum(dim=-1)
    last_kept = (kept > 0).sum(dim=-1, keepdim=True) - 1
    chosen = (cumulative <= uniform * cumulative[:, -1:]).sum(dim=-1, keepdim=True).minimum(last_kept)
    return order.gather(1, chosen).squeeze(1)


def _column(values: list[float] | list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)
