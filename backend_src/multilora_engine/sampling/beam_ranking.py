"""`rank_continuations`: finds the likeliest next tokens of the beams of a batch."""

from __future__ import annotations

import torch

from multilora_engine.batch.transfer import to_device
from multilora_engine.sequences.beam_search import Continuations
from multilora_engine.sequences.sequence import Sequence

_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny
"""The smallest normal float32: nothing rounds it to zero."""


@torch.inference_mode()
def rank_continuations(logits: torch.Tensor, beams: list[Sequence]) -> list[Continuations]:
    """The likeliest continuations of each beam. The beams may belong to several searches.

    logits: [len(beams), vocab], float32, after biases, penalties and bans.
    """
    count = min(max(beam.search.num_candidates for beam in beams if beam.search is not None), logits.shape[1])
    temperatures = [[max(beam.request.sampling.temperature, _MIN_TEMPERATURE)] for beam in beams]
    scores = [[beam.score] for beam in beams]
    # The largest logit becomes 0 first. So a small temperature makes infinities only of tokens that have no chance.
    below_best = logits - logits.amax(dim=-1, keepdim=True)
    log_probs = (below_best / to_device(torch.tensor(temperatures), logits.device)).log_softmax(dim=-1)
    best = (log_probs + to_device(torch.tensor(scores), logits.device)).topk(count, dim=-1)
    return [Continuations(*row) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
