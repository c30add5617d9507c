"""`GenerationFront`: the front of the models that generate, and that take adapters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from functools import cache, partial
from random import Random
from types import MappingProxyType

import msgspec

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InternalError, InvalidRequest, RequestError, TooManyLogits
from multilora_engine.guides.thinking import opens_thinking
from multilora_engine.lora.names import TaskId, scoped_task_id
from multilora_engine.process.client import Claims, Listener
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.serving.front import EngineLink, Front, give_back_free_memory, new_id
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.ordered_jobs import (
    LONG_JOB_THREADS,
    LONG_JOBS_OF_AN_OWNER,
    LONG_REQUEST_BYTES,
    MANY_BYTES,
    OrderedJobs,
)
from multilora_engine.serving.outputs import PromptTokens, ReplyRow
from multilora_engine.serving.replies import (
    ChatReply,
    EachReply,
    EmptyReply,
    OneReply,
    Reply,
    Responder,
    StreamReply,
    Transcript,
)
from multilora_engine.serving.request_parser import (
    AdapterChat,
    GenerateCall,
    UploadCall,
    UseOf,
    check_call,
    is_stop,
    logits_bytes,
    read_call,
    renders_own_template,
)
from multilora_engine.serving.senders import Rights
from multilora_engine.serving.sent_adapter import has_weights, read_set, read_task_id, weights_bytes
from multilora_engine.serving.triton_api import TritonRequest, parameters_of, trace_id_of
from multilora_engine.serving.unsupported import OUR_NAMES, DoorNames, refuse_lost_inputs, refuse_other_models
from multilora_engine.serving.uploads import InFlight, Uploads
from multilora_engine.text.tokenizer import Tokenizer
from multilora_wire.adapter_use import parse_use, use_digest

logger = logging.getLogger(__name__)

_Submission = tuple[Collection[Hashable], Callable[[], None], bool]
"""A request that was read: the keys of its order, what hands it to the engine, and whether that is long."""


_MAX_KNOWN_USES = 4096


class KnownUses:
    """The uses of adapters that the engine has told. Any thread may ask.

    They may be out of date: the engine compares them with the version that answers, and asks for another prompt. With
    them, a chat is written once, and no answer waits for the engine to ask.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[TaskId | None, str] = {}

    def believed(self, rights: Rights, lora_task_id: int, lora_name: str) -> str:
        """The use that an adapter had when the engine told it last; "" where it has told none."""
        task_id = scoped_task_id(rights.adapter_tenant(lora_task_id, lora_name), lora_task_id)
        with self._lock:
            return self._uses.get(task_id, "")

    def note(self, task_id: TaskId | None, use: str) -> None:
        """The engine has told the use of an adapter."""
        with self._lock:
            self._uses.pop(task_id, None)
            if use:
                self._uses[task_id] = use
            if len(self._uses) > _MAX_KNOWN_USES:
                del self._uses[next(iter(self._uses))]


class GenerationFront(Front):
    """The door of a generation model.

    can_stream: whether it may send more than one response a request. renamed: inputs by the names they have at this
    door, and their names everywhere else. make_responder: makes the responder of a request.
    """

    def __init__(
        self,
        link: EngineLink,
        can_stream: bool,
        renamed: Mapping[str, str] = MappingProxyType({}),
        make_responder: Callable[[TritonRequest], Responder] = Responder,
    ) -> None:
        super().__init__(link, make_responder)
        self._can_stream = can_stream
        self._uploads = Uploads()
        self._logits = InFlight()
        self._renamed = renamed
        self._jobs = OrderedJobs(LONG_JOB_THREADS, "long-requests", LONG_JOBS_OF_AN_OWNER)
        self._uses = KnownUses()

    def close(self) -> None:
        """Wait until every request that was accepted has gone to the engine."""
        self._jobs.close()

    def _submit(self, request: TritonRequest, responder: Responder) -> None:
        rights = self._link.rights(request)
        info, tokenizer = self._link.describe()
        inputs = self._read_inputs(request, responder, info, tokenizer)
        if is_stop(inputs):
            self._stop(responder, rights)
            return
        claims = Claims()
        with claims.closed_on_error():
            if has_weights(inputs):
                rights.check_upload()
                # Before they are packed, which takes the time and the memory that the limit is there for.
                end_upload = self._uploads.begin(rights.sender, weights_bytes(inputs, info), info)
                claims.until_taken.callback(end_upload)
            use_of = cache(partial(self._uses.believed, rights))
            read = partial(self._read, request, inputs, rights, responder, info, tokenizer, claims, use_of)
            if inputs.num_bytes <= LONG_REQUEST_BYTES and not renders_own_template(inputs, use_of):
                self._submit_in_turn(*read(), rights, responder)
            else:
                keys = _order_keys(rights, responder, *_named_task_ids(inputs, rights))
                gives_back = inputs.num_bytes > MANY_BYTES
                self._submit_in_turn(keys, partial(_read_and_submit, read, claims), True, rights, responder, gives_back)

    def _read_inputs(
        self, request: TritonRequest, responder: Responder, info: EngineInfo, tokenizer: Tokenizer
    ) -> InputTensors:
        """The inputs of a request as `generation` has them. Raises InvalidRequest for parameters that would be lost."""
        inputs = InputTensors(request, self._renamed)
        if not is_stop(inputs):
            parameters = parameters_of(request, info.limits.max_metadata_bytes)
            self._refuse_lost_inputs(parameters, info)
        return inputs

    def _refuse_lost_inputs(
        self, parameters: Mapping[str, list[str]], info: EngineInfo, names: DoorNames = OUR_NAMES
    ) -> None:
        """Raises InvalidRequest for parameters that could have been meant for inputs, or for an adapter."""
        named = ((name, value) for name, values in parameters.items() for value in values)
        refuse_other_models(named, self._link.names_of_no_adapter(info), names.adapter)
        refuse_lost_inputs(parameters, names)

    def _read(
        self,
        request: TritonRequest,
        inputs: InputTensors,
        rights: Rights,
        responder: Responder,
        info: EngineInfo,
        tokenizer: Tokenizer,
        claims: Claims,
        use_of: UseOf,
    ) -> _Submission:
        call = read_call(inputs, info, tokenizer, use_of)
        if isinstance(call, UploadCall):
            return self._upload(call, rights, responder, claims)
        return self._generate(call, rights, request, responder, info, tokenizer, claims)

    def _stop(self, responder: Responder, rights: Rights) -> None:
        if not responder.request_id:
            raise InvalidRequest("stop needs the request id of the request that shall end")
        stop = partial(self._link.client.stop, EmptyReply(responder), new_id(), responder.request_id, rights.sender)
        self._submit_in_turn(_order_keys(rights, responder), stop, False, rights, responder)

    def _upload(self, call: UploadCall, rights: Rights, responder: Responder, claims: Claims) -> _Submission:
        request_id, sent = new_id(), call.adapter
        task_id = rights.uploaded_task_id(sent.lora_task_id, call.lora_name)
        reply = OneReply(responder, {request_id: Transcript(ReplyRow(lora_task_id=sent.lora_task_id))})

        def submit() -> None:
            with claims.closed_on_error():
                client, name, expected = self._link.client, call.lora_name, call.expected_digest
                client.put_adapter(reply, request_id, task_id, sent.pack(), name, claims, rights.sender, expected)

        return _order_keys(rights, responder, task_id), submit, True

    def _generate(
        self,
        call: GenerateCall,
        rights: Rights,
        request: TritonRequest,
        responder: Responder,
        info: EngineInfo,
        tokenizer: Tokenizer,
        claims: Claims,
    ) -> _Submission:
        if call.is_streaming and not self._can_stream:
            raise InvalidRequest("this model sends one response; for streaming call the model generation")
        check_call(call, info, self._can_stream)
        self._claim_logits(call, info, claims)
        requests, rows = _expand(call, _timeout_s(request), tokenizer)
        requests = [rights.grant(request, call.is_streaming) for request in requests]
        sent, task_ids = call.adapter, {request.task_id for request in requests}
        task_ids.update(member.task_id for request in requests for member in request.lora_set)
        sent_id = rights.uploaded_task_id(sent.lora_task_id, call.lora_names[0]) if sent else None
        reply = self._listener(call, requests, rows, responder, info, tokenizer)
        trace_id = trace_id_of(request)

        def submit() -> None:
            with claims.closed_on_error():
                adapter = None if sent is None or sent_id is None else (sent_id, sent.pack())
                self._link.client.generate(reply, requests, responder.request_id, adapter, trace_id, claims)

        return _order_keys(rights, responder, sent_id, *task_ids), submit, sent is not None

    def _submit_in_turn(
        self,
        keys: Collection[Hashable],
        submit: Callable[[], None],
        is_long: bool,
        rights: Rights,
        responder: Responder,
        gives_back: bool = False,
    ) -> None:
        """Do `submit` after all earlier work with the same `keys`, on another thread if it is long.

        gives_back: whether the memory that `submit` used and freed goes back to Linux.
        """

        def work() -> None:
            self._try(responder, submit)
            if gives_back:
                give_back_free_memory()

        self._jobs.submit(keys, work, is_long, rights.sender.name)

    def _claim_logits(self, call: GenerateCall, info: EngineInfo, claims: Claims) -> None:
        """Raises TooManyLogits."""
        if num_bytes := logits_bytes(call, info):
            most = info.limits.max_logits_bytes_in_flight
            end = self._logits.begin("", num_bytes, most, partial(TooManyLogits, max_bytes=most))
            claims.until_ended.callback(end)

    def _listener(
        self,
        call: GenerateCall,
        requests: list[GenerationRequest],
        rows: Mapping[str, ReplyRow],
        responder: Responder,
        info: EngineInfo,
        tokenizer: Tokenizer,
    ) -> Listener:
        """The listener that answers a call. It writes a chat anew whose adapter turns out to have another use."""
        reply = self._reply(call, rows, responder, tokenizer)
        chats = {
            request.request_id: (request, rows[request.request_id], chat)
            for request in requests
            if (chat := call.chats[rows[request.request_id].batch_index]) is not None
        }
        if not chats:
            return reply

        def write(request_id: str, use: str) -> None:
            request, row, chat = chats[request_id]
            self._uses.note(request.task_id, use)
            work = partial(self._write_chat, request, row, chat, use, reply, responder, info, tokenizer)
            self._jobs.submit((), work, True, request.sender.name)

        return ChatReply(reply, write)

    def _write_chat(
        self,
        request: GenerationRequest,
        row: ReplyRow,
        chat: AdapterChat,
        use: str,
        reply: Reply,
        responder: Responder,
        info: EngineInfo,
        tokenizer: Tokenizer,
    ) -> None:
        """Give the engine the prompt and the options that a chat makes by the use of its adapter. Raises nothing."""
        client = self._link.client
        try:
            prompt, sampling = chat.read(parse_use(use), info, tokenizer)
            sampling = _sampling_of(sampling, row.sequence_index)
            written = msgspec.structs.replace(
                request, prompt_token_ids=prompt, sampling=sampling, chat_use=use_digest(use)
            )
            told = msgspec.structs.replace(
                row,
                prompt=_told_prompt(prompt, sampling, tokenizer),
                thinking_is_open=opens_thinking(prompt, tokenizer),
            )
            text = tokenizer.decode(prompt) if responder.wants_text else ""
        except RequestError as error:
            client.refuse_prompt(request.request_id, error.with_traceback(None))
        except Exception as error:
            logger.exception("request %s failed", responder.request_id)
            client.refuse_prompt(request.request_id, InternalError(f"{type(error).__name__}: {error}"))
        else:
            client.call_soon(partial(reply.set_prompt, request.request_id, told, prompt, text))
            client.give_prompt(written)

    def _reply(
        self,
        call: GenerateCall,
        rows: Mapping[str, ReplyRow],
        responder: Responder,
        tokenizer: Tokenizer,
    ) -> Reply:
        if call.is_streaming:
            return StreamReply(responder, rows, call.pad_id)
        transcripts = transcripts_of(call, rows, responder, tokenizer)
        if self._can_stream and len(transcripts) > 1:
            return EachReply(responder, transcripts, call.pad_id)
        return OneReply(responder, transcripts, call.pad_id, call.num_sequences)


def _read_and_submit(read: Callable[[], _Submission], claims: Claims) -> None:
    with claims.closed_on_error():
        _, submit, _ = read()
    submit()


def _expand(
    call: GenerateCall, timeout_s: float | None, tokenizer: Tokenizer
) -> tuple[list[GenerationRequest], dict[str, ReplyRow]]:
    """A request to the engine for each sequence of each row, and by their ids which they are."""
    requests, rows, num_tokens = [], {}, 0
    for batch_index, prompt in enumerate(call.prompts):
        lora_task_id, lora_name = call.lora_task_ids[batch_index], call.lora_names[batch_index]
        priority = call.priorities[batch_index]
        for sequence_index in range(call.requests_per_row):
            sampling = _sampling_of(call.sampling[batch_index], sequence_index)
            request = GenerationRequest(
                new_id(),
                prompt,
                sampling,
                lora_task_id,
                timeout_s,
                priority,
                lora_name,
                num_tokens_ahead=num_tokens,
                tells_perf=call.is_streaming and (call.returns_perf or call.returns_kv_cache),
                lora_start=call.lora_starts[batch_index],
                lora_set=call.lora_sets[batch_index],
                lora_path=call.lora_paths[batch_index],
                lora_expected_digest=call.lora_expected_digests[batch_index],
                lora_session=call.lora_sessions[batch_index],
                source_token_ids=call.sources[batch_index],
                chat_use=call.chat_uses[batch_index],
            )
            num_tokens += len(call.sources[batch_index]) + len(prompt) + sampling.max_tokens
            requests.append(request)
            rows[request.request_id] = ReplyRow(
                batch_index,
                sequence_index,
                lora_task_id,
                returns_log_probs=sampling.return_log_probs,
                returns_perf=call.returns_perf,
                returns_kv_cache=call.returns_kv_cache,
                returns_top_log_probs=sampling.num_top_log_probs > 0,
                returns_generation_logits=sampling.return_generation_logits,
                vocab_size=call.vocab_size,
                num_context_tokens=len(prompt),
                token_bytes=tokenizer.token_bytes if sampling.return_log_probs else None,
                prompt=_told_prompt(prompt, sampling, tokenizer),
                thinking_is_open=opens_thinking(prompt, tokenizer),
            )
    return requests, rows


def _told_prompt(prompt: list[int], sampling: SamplingParams, tokenizer: Tokenizer) -> PromptTokens | None:
    if not sampling.return_prompt_log_probs:
        return None
    return PromptTokens(prompt, sampling.num_prompt_top_log_probs, tokenizer.spell)


def _sampling_of(sampling: SamplingParams, sequence_index: int) -> SamplingParams:
    """The first sequence is the answer to a request for one alone; the others draw from seeds of their own."""
    if sampling.seed is None or sequence_index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=Random(f"{sampling.seed} {sequence_index}").getrandbits(64))


def transcripts_of(
    call: GenerateCall, rows: Mapping[str, ReplyRow], responder: Responder, tokenizer: Tokenizer
) -> dict[str, Transcript]:
    """The transcripts by the engine's request ids; they start with the prompt unless it is left out.

    Of a model with an encoder that is the beginning of the decoder's text, and never the source.
    """
    num_beams = call.num_sequences if call.is_search else 0
    if call.excludes_input:
        return {request_id: Transcript(row, num_beams=num_beams) for request_id, row in rows.items()}
    texts = [
        tokenizer.decode(prompt, is_start=bool(source)) if responder.wants_text else ""
        for prompt, source in zip(call.prompts, call.sources, strict=True)
    ]
    return {
        request_id: Transcript(
            row, list(call.prompts[row.batch_index]), texts[row.batch_index], num_beams=num_beams, has_prompt=True
        )
        for request_id, row in rows.items()
    }


def _named_task_ids(inputs: InputTensors, rights: Rights) -> set[TaskId | None]:
    """The adapters that a request names, which has not been read yet. Raises InvalidRequest, PermissionDenied."""
    named = inputs.present("lora_task_id", "lora_name", "lora_set_task_ids")
    task_ids: set[TaskId | None] = set()
    for row in range(inputs.num_rows(named[0]) if named else 0):
        if members := read_set(inputs, row):
            task_ids.update(scoped_task_id(rights.adapter_tenant(m.lora_task_id, ""), m.lora_task_id) for m in members)
        elif (task_id := read_task_id(inputs, row)) is not None:
            tenant = rights.adapter_tenant(task_id, inputs.text("lora_name", row) or "")
            task_ids.add(scoped_task_id(tenant, task_id))
    return task_ids


def _order_keys(rights: Rights, responder: Responder, *task_ids: TaskId | None) -> set[Hashable]:
    """Requests that share a key keep their order: none overtakes the upload of its adapter, no stop its request."""
    keys: set[Hashable] = {task_id for task_id in task_ids if task_id is not None}
    if responder.request_id:
        keys.add((rights.sender.name, responder.request_id))
    return keys


def _timeout_s(request: TritonRequest) -> float | None:
    """Triton carries the client's timeout, in microseconds, and leaves it to the model to keep it."""
    return request.timeout() / 1e6 if request.timeout() > 0 else None
