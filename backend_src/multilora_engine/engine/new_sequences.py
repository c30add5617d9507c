"""`NewSequences`: makes the sequence of a request that an engine can answer."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from random import Random

import torch

from multilora_engine.engine.beam_search import BeamSearch
from multilora_engine.engine.held_outputs import PromptReport
from multilora_engine.engine.host_work import has_host_work
from multilora_engine.engine.request_limits import RequestLimits
from multilora_engine.engine.sequence import Sequence, Times
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sampling.logits import bias_tensors, end_tokens
from multilora_engine.sampling.prompt_log_probs import PromptLogProbs
from multilora_engine.text.text_stream import TextStream
from multilora_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class NewSequences:
    """end_token_ids: the checkpoint's. device: where biases go."""

    tokenizer: Tokenizer
    limits: RequestLimits
    end_token_ids: tuple[int, ...]
    device: torch.device
    _arrivals: itertools.count[int] = field(default_factory=itertools.count)

    def make(self, request: GenerationRequest) -> Sequence:
        """The sequence of a request that keeps the limits, without adapter and guide. Raises InvalidRequest."""
        text = _text_stream(self.tokenizer, request.sampling)
        return Sequence(
            request=request,
            arrival=next(self._arrivals),
            adapter=None,
            text=text,
            random=Random(request.sampling.seed),
            max_output_tokens=self.limits.max_output_tokens(request),
            times=Times(arrival_ns=time.monotonic_ns()),
            bias=bias_tensors(request.sampling, self.device),
            has_host_work=has_host_work(request.sampling),
            search=self._search(request, text),
            prompt_report=PromptReport(log_probs=_prompt_log_probs(request)),
        )

    def _search(self, request: GenerationRequest, text: TextStream) -> BeamSearch | None:
        if request.sampling.beam_width == 1:
            return None
        ends = end_tokens(request.sampling, self.end_token_ids)
        return BeamSearch(request.sampling, ends, self.limits.max_output_tokens(request), text.fork())


def _text_stream(tokenizer: Tokenizer, sampling: SamplingParams) -> TextStream:
    return TextStream(
        tokenizer, sampling.stop_words, sampling.stop_token_sequences, sampling.include_stop_str_in_output
    )


def _prompt_log_probs(request: GenerationRequest) -> PromptLogProbs | None:
    if not request.sampling.return_prompt_log_probs:
        return None
    return PromptLogProbs(len(request.prompt_token_ids), request.sampling.num_prompt_top_log_probs)
