"""Makes the `TokenOutput`s of a sequence."""

from __future__ import annotations

import logging

from multilora_engine.errors import AdapterNotFound, AdapterOverflow, InternalError, InvalidRequest, RequestError
from multilora_engine.log_lines import one_line
from multilora_engine.request import BeamOutput, FinishReason, GenerationRequest, TokenOutput
from multilora_engine.sequences.sequence import Sequence
from multilora_engine.text.text_stream import TextDelta

_MAX_REASON_CHARS = 200

_logger = logging.getLogger(__name__)


def token_output(sequence: Sequence, delta: TextDelta, finish_reason: FinishReason | None = None) -> TokenOutput:
    """Tokens that may leave, with everything that was asked of them. finish_reason: of the last output."""
    held, report, num_tokens = sequence.held, sequence.prompt_report, len(delta.token_ids)
    return TokenOutput(
        request_id=sequence.request.request_id,
        token_ids=delta.token_ids,
        text=delta.text,
        finish_reason=finish_reason,
        num_prompt_tokens=sequence.request.num_prompt_tokens,
        num_output_tokens=len(sequence.output_token_ids),
        lora_digest="" if sequence.adapter is None else sequence.adapter.digest,
        lora_name=sequence.request.lora_name,
        log_probs=held.release_log_probs(num_tokens),
        cum_log_prob=held.cum_log_prob,
        generation_logits=held.release_logits(num_tokens),
        context_logits=report.release_logits(),
        prompt_log_probs=report.release_log_probs(),
        num_cached_tokens=sequence.num_cached_tokens,
        perf=sequence.perf if finish_reason is not None or sequence.request.tells_perf else None,
        stop_word=delta.stop_word,
    )


def prompt_output(sequence: Sequence) -> TokenOutput:
    """The logits of a part of the prompt. They leave as soon as they are there: copying those of a whole prompt takes
    as long as several steps, for which all requests would wait."""
    return TokenOutput(
        request_id=sequence.request.request_id,
        token_ids=[],
        text="",
        num_prompt_tokens=sequence.request.num_prompt_tokens,
        lora_digest="" if sequence.adapter is None else sequence.adapter.digest,
        lora_name=sequence.request.lora_name,
        context_logits=sequence.prompt_report.release_logits(),
    )


def beams_output(sequence: Sequence, beams: list[BeamOutput], finish_reason: FinishReason) -> TokenOutput:
    """The only output of a beam search. sequence: stands for the search."""
    return TokenOutput(
        request_id=sequence.request.request_id,
        token_ids=[],
        text="",
        finish_reason=finish_reason,
        num_prompt_tokens=sequence.request.num_prompt_tokens,
        num_output_tokens=sum(len(beam.token_ids) for beam in beams),
        num_cached_tokens=sequence.num_cached_tokens,
        lora_digest="" if sequence.adapter is None else sequence.adapter.digest,
        lora_name=sequence.request.lora_name,
        perf=sequence.perf,
        beams=beams,
    )


def error_output(request: GenerationRequest, error: RequestError) -> TokenOutput:
    """The last output of a request that failed."""
    if isinstance(error, AdapterNotFound):
        error = error.under_name(request.lora_name)
    return TokenOutput(request.request_id, [], "", error_code=error.code, error_message=str(error))


def failure_output(sequence: Sequence, error: Exception) -> TokenOutput:
    """The last output of a request whose own work on the host raised, which is logged: a fault of ours."""
    _logger.error("request %s: its work on the host failed", sequence.request.request_id, exc_info=error)
    reason = one_line(f"{type(error).__name__}: {error}", _MAX_REASON_CHARS)
    return error_output(sequence.request, InternalError(f"the request's work on the host failed: {reason}"))


def overflow(sequence: Sequence) -> RequestError:
    """The error of a request whose numbers overflowed in the model."""
    if sequence.adapter is None:
        return InternalError("the model's logits are not finite numbers")
    return AdapterOverflow(sequence.request.lora_task_id, sequence.request.lora_name, sequence.adapter.digest)


def no_token_left(sequence: Sequence) -> InvalidRequest:
    """The error of a request whose own options forbid every token."""
    num_tokens, sampling = len(sequence.output_token_ids), sequence.request.sampling
    options = {
        "guide": sampling.guide is not None,
        "bad words": bool(sampling.bad_token_sequences),
        "min_tokens": num_tokens < sampling.min_tokens,
    }
    names = " and ".join(name for name, is_given in options.items() if is_given)
    return InvalidRequest(f"after {num_tokens} tokens, the request's {names} forbid every token of the vocabulary")
