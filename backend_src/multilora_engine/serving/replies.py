"""When to send which response. Listeners of the engine client: its thread calls them, and only it sends.

Every Triton request gets exactly one final response; the final flag rides on the last response with data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from multilora_engine.errors import RelayedError, RequestError
from multilora_engine.request import BeamOutput, TokenLogProb, TokenOutput
from multilora_engine.serving.outputs import OutputColumns, ReplyRow, RowAnswer
from multilora_engine.serving.triton_api import TritonRequest, backend_utils, error_response, request_id_of


class PromptLogits:
    """A piece is copied to its place when it comes: copying all at once would hold up the thread of all answers."""

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        """num_tokens: of the prompt."""
        self._rows = np.empty((num_tokens, vocab_size), np.float32)
        self._num_known = 0

    def append(self, values: bytes) -> None:
        """values: float32 [n, vocab] of the next tokens."""
        rows = np.frombuffer(values, np.float32).reshape(-1, self._rows.shape[1])
        start, self._num_known = self._num_known, self._num_known + len(rows)
        self._rows[start : self._num_known] = rows

    @property
    def rows(self) -> NDArray[np.float32]:
        """Logits of the tokens so far, which are all of the prompt's unless its request was ended: [tokens, vocab]."""
        return self._rows[: self._num_known]


class Responder:
    """Makes responses to one Triton request, each with the requested outputs that have content.

    They are sent by `flush`. An ensemble asks its steps for everything, and passes on all it gets. An output
    that a response repeats of the one before is the same tensor, which is in shared memory already.
    """

    def __init__(self, request: TritonRequest, has_flat_text: bool = False) -> None:
        self.request_id = request_id_of(request)
        self._names = frozenset(request.requested_output_names())
        self._columns = OutputColumns(self._names, has_flat_text)
        self._sender = request.get_response_sender()
        self._backend = backend_utils()
        self._told: dict[str, tuple[list[int | bytes], Any]] = {}
        self._unsent: list[tuple[Any, int]] = []
        self.unsent_bytes = 0
        """Bytes of the tensors that `flush` will send, without the small ones that every response has."""

    @property
    def wants_text(self) -> bool:
        """Whether the request asks for the answers' texts, in either shape."""
        return self._columns.has_text

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled()

    def respond(self, answers: Sequence[RowAnswer], pad_id: int, is_final: bool, num_sequences: int = 1) -> None:
        """answers: `num_sequences` for each row, as many in all responses of a request."""
        for name, values in self._columns.plain_values(answers).items():
            if name not in self._told or self._told[name][0] != values:
                self._told[name] = values, self._tensor(name, self._columns.plain_array(name, values, num_sequences))
        others = self._columns.other_arrays(answers, pad_id, num_sequences)
        self.unsent_bytes += sum(array.nbytes for array in others.values())
        # In this order: there are clients of upstream's that take the first output for output_ids.
        tensors = [self._tensor(name, array) for name, array in others.items()]
        tensors += [tensor for _, tensor in self._told.values()]
        self._append(self._backend.InferenceResponse(tensors), is_final)

    def respond_text(self, name: str, text: str) -> None:
        """A final response with one string."""
        self._append_arrays({name: np.array([[text.encode()]], np.object_)}, is_final=True)

    def respond_empty(self) -> None:
        """A final response without tensors."""
        self._append(self._backend.InferenceResponse([]), is_final=True)

    def fail(self, error: RequestError) -> None:
        self._append(error_response(error, self.request_id), is_final=True)

    def flush(self) -> None:
        """Send the responses that have been made."""
        unsent, self._unsent, self.unsent_bytes = self._unsent, [], 0
        for response, flags in unsent:
            self._sender.send(response, flags)

    def _append_arrays(self, arrays: Mapping[str, NDArray[Any]], is_final: bool) -> None:
        """A response with the arrays that the request asks for."""
        tensors = [self._tensor(name, array) for name, array in arrays.items() if name in self._names]
        self._append(self._backend.InferenceResponse(tensors), is_final)

    def _tensor(self, name: str, array: NDArray[Any]) -> Any:
        return self._backend.Tensor(name, array)

    def _append(self, response: Any, is_final: bool) -> None:
        self._unsent.append((response, self._backend.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0))


class Reply(ABC):
    """The listener of a call: makes responses to one Triton request of the outputs it hears."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def is_cancelled(self) -> bool:
        return self._responder.is_cancelled()

    def on_output(self, output: TokenOutput) -> None:
        if output.error_code is not None:
            self._fail(RelayedError(output.error_code, output.error_message or ""))
        else:
            self._answer(output)

    @property
    def unsent_bytes(self) -> int:
        return self._responder.unsent_bytes

    def flush(self) -> None:
        self._responder.flush()

    def set_prompt(self, request_id: str, row: ReplyRow, token_ids: list[int], text: str) -> None:
        """The prompt of a request is known only now, before any of its tokens. text: of the prompt, if it is told."""
        raise AssertionError("a request of this kind brings its prompt")

    def _fail(self, error: RequestError) -> None:
        self._responder.fail(error)

    @abstractmethod
    def _answer(self, output: TokenOutput) -> None: ...


class StreamReply(Reply):
    """Responses with new tokens and text only. A row's first one leaves at once, and has all values of the prompt."""

    def __init__(
        self, responder: Responder, rows: Mapping[str, ReplyRow], pad_id: int, repeats_text: bool = False
    ) -> None:
        """rows: by the engine's request ids. repeats_text: whether each response has all of the text so far."""
        super().__init__(responder)
        self._rows = dict(rows)
        self._open = set(rows)
        self._num_told = dict.fromkeys(rows, 0)
        self._texts = dict.fromkeys(rows, "") if repeats_text else None
        self._prompt_logits: dict[str, PromptLogits] = {}
        self._pad_id = pad_id

    def set_prompt(self, request_id: str, row: ReplyRow, token_ids: list[int], text: str) -> None:
        self._rows[request_id] = row

    def _answer(self, output: TokenOutput) -> None:
        row, num_told = self._rows[output.request_id], self._num_told[output.request_id]
        if output.context_logits:
            if output.request_id not in self._prompt_logits:
                self._prompt_logits[output.request_id] = PromptLogits(row.num_context_tokens, row.vocab_size)
            self._prompt_logits[output.request_id].append(output.context_logits)
        if output.is_of_prompt:
            return
        if output.is_final:
            self._open.remove(output.request_id)
        logits = self._prompt_logits.pop(output.request_id, None)
        if self._texts is not None:
            self._texts[output.request_id] += output.text
            output = msgspec.structs.replace(output, text=self._texts[output.request_id])
        answer = row.answer(output, num_told, logits.rows if logits else None)
        self._num_told[output.request_id] = output.num_output_tokens
        self._responder.respond([answer], self._pad_id, is_final=not self._open)


@dataclass
class Transcript:
    """The answer of a sequence so far; it starts with the prompt, unless that is left out.

    num_beams: how many answers a beam search shall give, 0 for a sequence that is drawn.
    has_prompt: whether it starts with the prompt.
    """

    row: ReplyRow
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    log_probs: list[TokenLogProb] = field(default_factory=list)
    generation_logits: list[bytes] = field(default_factory=list)
    prompt_logits: PromptLogits | None = None
    prompt_log_probs: bytes = b""
    last: TokenOutput | None = None
    num_beams: int = 0
    has_prompt: bool = False

    def set_prompt(self, row: ReplyRow, token_ids: list[int], text: str) -> None:
        """Begin anew, with another prompt."""
        self.row = row
        if self.has_prompt:
            self.token_ids, self.text = list(token_ids), text

    @property
    def is_complete(self) -> bool:
        return self.last is not None and self.last.is_final

    def append(self, output: TokenOutput) -> None:
        self.token_ids += output.token_ids
        self.text += output.text
        self.log_probs += output.log_probs
        self.generation_logits.append(output.generation_logits)
        if output.context_logits:
            self.prompt_logits = self.prompt_logits or PromptLogits(self.row.num_context_tokens, self.row.vocab_size)
            self.prompt_logits.append(output.context_logits)
        self.prompt_log_probs = self.prompt_log_probs or output.prompt_log_probs
        self.last = output

    def answers(self) -> list[RowAnswer]:
        assert self.last is not None
        if not self.num_beams:
            logits = self.prompt_logits.rows if self.prompt_logits else None
            return [self.row.answer(self._whole(self.last), context_logits=logits)]
        missing = [_no_beam(self.last)] * (self.num_beams - len(self.last.beams))
        beams = [*self.last.beams, *missing][: self.num_beams]
        return [self._beam_answer(index, beam, self.last) for index, beam in enumerate(beams)]

    def _whole(self, last: TokenOutput) -> TokenOutput:
        return msgspec.structs.replace(
            last,
            token_ids=self.token_ids,
            text=self.text,
            log_probs=self.log_probs,
            generation_logits=b"".join(self.generation_logits),
            prompt_log_probs=self.prompt_log_probs,
        )

    def _beam_answer(self, index: int, beam: BeamOutput, output: TokenOutput) -> RowAnswer:
        row = msgspec.structs.replace(self.row, sequence_index=index)
        return row.answer(
            msgspec.structs.replace(
                output,
                token_ids=self.token_ids + beam.token_ids,
                text=self.text + beam.text,
                finish_reason=beam.finish_reason,
                num_output_tokens=len(beam.token_ids),
                log_probs=beam.log_probs,
                cum_log_prob=beam.cum_log_prob,
            )
        )


class EachReply(Reply):
    """A response for each sequence of each row, or for all beams of a row, once it has ended."""

    def __init__(self, responder: Responder, transcripts: Mapping[str, Transcript], pad_id: int) -> None:
        """transcripts: by the engine's request ids."""
        super().__init__(responder)
        self._transcripts = transcripts
        self._pad_id = pad_id

    def set_prompt(self, request_id: str, row: ReplyRow, token_ids: list[int], text: str) -> None:
        self._transcripts[request_id].set_prompt(row, token_ids, text)

    def _answer(self, output: TokenOutput) -> None:
        transcript = self._transcripts[output.request_id]
        transcript.append(output)
        if transcript.is_complete:
            is_final = all(transcript.is_complete for transcript in self._transcripts.values())
            answers = transcript.answers()
            self._responder.respond(answers, self._pad_id, is_final, num_sequences=len(answers))


class OneReply(Reply):
    """One response with all rows, once each has ended."""

    def __init__(
        self, responder: Responder, transcripts: Mapping[str, Transcript], pad_id: int = 0, num_sequences: int = 1
    ) -> None:
        """transcripts: by the engine's request ids, row by row, with `num_sequences` answers of each."""
        super().__init__(responder)
        self._transcripts = transcripts
        self._pad_id = pad_id
        self._num_sequences = num_sequences

    def set_prompt(self, request_id: str, row: ReplyRow, token_ids: list[int], text: str) -> None:
        self._transcripts[request_id].set_prompt(row, token_ids, text)

    def _answer(self, output: TokenOutput) -> None:
        self._transcripts[output.request_id].append(output)
        if all(transcript.is_complete for transcript in self._transcripts.values()):
            answers = [answer for transcript in self._transcripts.values() for answer in transcript.answers()]
            self._responder.respond(answers, self._pad_id, is_final=True, num_sequences=self._num_sequences)


class ChatReply:
    """The listener of a call with chats of adapters: it has a chat written when the engine asks for a prompt.

    write: called with the id of the request and the use of its adapter, on the client's thread; must return quickly.
    """

    def __init__(self, reply: Reply, write: Callable[[str, str], None]) -> None:
        self._reply = reply
        self._write = write

    @property
    def unsent_bytes(self) -> int:
        return self._reply.unsent_bytes

    def on_output(self, output: TokenOutput) -> None:
        if output.asked_use is None:
            self._reply.on_output(output)
        else:
            self._write(output.request_id, output.asked_use)

    def flush(self) -> None:
        self._reply.flush()

    def is_cancelled(self) -> bool:
        return self._reply.is_cancelled()


class TextReply(Reply):
    """One response whose output `name` is the text of the one output."""

    def __init__(self, responder: Responder, name: str) -> None:
        super().__init__(responder)
        self._name = name

    def _answer(self, output: TokenOutput) -> None:
        self._responder.respond_text(self._name, output.text)


class EmptyReply(Reply):
    """An empty response, by which upstream's clients know that the request they wanted stopped has stopped."""

    def _answer(self, output: TokenOutput) -> None:
        self._responder.respond_empty()


def _no_beam(output: TokenOutput) -> BeamOutput:
    """Stands for a beam that a search did not find: the request's bans left fewer continuations than beams."""
    return BeamOutput([], "", output.finish_reason or "length", [], -math.inf)
