"""Every error that a client or an operator can cause, as one tree. One that only our own bug can cause is an assert.

    MultiloraError
      ConfigError                                 stops the load; the message says how to mend it
      DeviceDead                                  ends the engine process; its supervisor starts another one
      RequestError                                reaches the client that caused it, and no other
        InvalidRequest      -> INVALID_ARG        malformed or contradictory input
          PathNotCovered                          no source of the operator's covers the path of an adapter to load
          AdapterUnusable                         a source's adapter is refused, damaged or unsupported
          AdapterOverflow                         with the adapter's weights the model computes no numbers
          AdapterNotInvoked                       the tokens that activate the adapter are not in the prompt
          TooMuchHostWork                         words, guide or beams keep the engine's thread too long
        AdapterNotFound     -> NOT_FOUND          `lora_task_id` is not cached and no weights came with it
          AdapterNotKnown                         no adapter has the `lora_name`
        AdapterVersionNotFound -> NOT_FOUND       the adapter has another digest than the request demands
        AdapterNotHere      -> NOT_FOUND          an operation is on an adapter that no tier has
        AdapterConflict     -> ALREADY_EXISTS     the id is cached with other weights
        AdapterVersionChanged -> ALREADY_EXISTS   the adapter has another digest than the operator expects
        FetchConflict       -> ALREADY_EXISTS     the adapter is on its way and may come from another source
          AliasConflict                           a name would be that of an adapter and that of an alias
        AliasVersionNotFound -> NOT_FOUND         no member of the alias has the digest that the request demands
        AliasNotKnown       -> NOT_FOUND          an operation is on an alias that there is not
        Unsupported         -> UNSUPPORTED        well-formed, but something this server does not do
        Unavailable         -> UNAVAILABLE        try again later
          AdapterCacheFull                        every cached adapter is pinned by a request in flight
          AdapterNotLoaded                        copying a cached adapter to where it is needed failed this time
          AdapterNotKept                          an uploaded adapter cannot be written to the disk tier
          AliasNotKept                            a changed alias cannot be written to the disk tier
          TooManyUploads                          a client sends more adapters at once than it may
          TooManyUploadBytes                      unknown clients send more bytes of adapters at once than one known may
          TooManyLogits                           the requests at a model ask for more logits than they may
          GuidesFull                              the guides in use take all the memory that guides may
          GuideTimeout                            a guide was not compiled in time
          QueueFull                               `max_queue_size` requests are waiting already
          QueueShareFull                          so many of one client's are that no more of its may
          EngineUnavailable                       the engine process died or is starting
          UnpackedWeightsFull                     memory does not hold the floats of weights
          WeightsBusy                             other weights are being unpacked
          SourceUnavailable                       a source of adapters cannot be reached
          RateExceeded      -> RESOURCE_EXHAUSTED an API key's requests or tokens of a minute are used up
        Unauthenticated     -> UNAUTHENTICATED    the server has API keys and the request has none of them
        PermissionDenied    -> PERMISSION_DENIED  the API key may not do that
        Cancelled           -> CANCELLED          the client, a `stop` request or the deadline ended it
        InternalError       -> INTERNAL           a step failed on the device, and its requests are lost; or the work of
                                                  one request on the host, and it alone is

On streams and on HTTP generate Triton hands only the message on. So `wire_message` puts the code before the text and
the request id after it:
`[NOT_FOUND] LoRA task 7 not found in cache. Please send LoRA weights with request (request ab12)`.

A `lora_task_id` is a `multilora_engine.lora.names.TaskId`, of which an error keeps the text alone; names.py raises
these errors and cannot be imported here.
"""

from __future__ import annotations

from collections.abc import Mapping

from multilora_engine.log_lines import one_line
from multilora_wire.messages import shortened

MAX_REQUEST_ID_CHARS = 128
"""The longest id that a client may give its request. Logs, errors and stops name the request by it."""


class MultiloraError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(MultiloraError):
    """A parameter is unknown, malformed or impossible; the message names it and a value to write."""


class DeviceDead(MultiloraError):
    """The device computes nothing any more in this process; a new one may help."""


class RequestError(MultiloraError):
    """Base of a request's errors. `code` is the name of the Triton status it becomes, where Triton has it.

    However long the input that a message quotes, the message is some lines long.
    """

    code: str

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))

    def wire_message(self, request_id: str) -> str:
        """The text a client sees: code, message, request id."""
        return f"[{self.code}] {self} (request {one_line(request_id, MAX_REQUEST_ID_CHARS) or '-'})"


class InvalidRequest(RequestError):
    """Malformed or contradictory input."""

    code = "INVALID_ARG"


class PathNotCovered(InvalidRequest):
    """No source covers the path that an adapter shall be loaded from. The text names the sources, not their places."""

    def __init__(self, path: str, sources: list[str]) -> None:
        names = ", ".join(sources)
        asked = f"none of the sources asked ({names}) covers it" if names else "the server has no lora_sources"
        super().__init__(
            f"adapters cannot be loaded from {path[:200]!r}: {asked}. Paths are absolute directories below a root of "
            "lora_sources, repositories that their patterns allow, or URLs below theirs"
        )


class AdapterUnusable(InvalidRequest):
    """A source has something under the adapter's name, and it is refused, damaged or unsupported."""

    def __init__(self, adapter: str, source: str, reason: str) -> None:
        super().__init__(f"LoRA adapter {adapter!r} of source {source!r} cannot be used: {reason}")


class AdapterOverflow(InvalidRequest):
    """With the adapter's weights the model's numbers exceed their type: there is no answer, and the weights are why."""

    def __init__(self, lora_task_id: int | None, lora_name: str, digest: str) -> None:
        name = f" {lora_name!r}" if lora_name else ""
        super().__init__(
            f"the numbers overflow with the weights of LoRA task {lora_task_id}{name} (digest {digest[:12]}): the "
            "logits are not finite"
        )


class AdapterNotInvoked(InvalidRequest):
    """The prompt, as computed, does not have the tokens from which on the adapter would count."""

    def __init__(
        self, lora_task_id: int | None, lora_name: str, tokens: tuple[int, ...], num_prompt_tokens: int
    ) -> None:
        name = f" {lora_name!r}" if lora_name else ""
        super().__init__(
            f"LoRA task {lora_task_id}{name} is activated by the tokens {list(tokens)}, which the prompt of "
            f"{num_prompt_tokens} tokens does not have, so that the adapter would compute nothing; send a prompt with "
            "them, or lora_start"
        )


class TooMuchHostWork(InvalidRequest):
    """The work of a request between steps, for words, a guide or beams, keeps all other requests waiting."""

    def __init__(self, debt_s: float, seconds_per_step: float, num_sharing: int) -> None:
        super().__init__(
            f"words, guide or beams of this request took {debt_s * 1e3:.0f} ms more of the engine's thread than its "
            f"share: all requests may take {seconds_per_step * 1e3:g} ms of a step, and {num_sharing} share that"
        )


class AdapterNotFound(RequestError):
    """The adapter of a task id is in no tier. Existing clients match this text and answer by sending the weights."""

    code = "NOT_FOUND"

    def __init__(self, lora_task_id: object, reason: str = "") -> None:
        super().__init__(
            f"LoRA task {lora_task_id} not found in cache. Please send LoRA weights with request"
            + (f" ({reason})" if reason else "")
        )
        self.reason = reason

    def under_name(self, lora_name: str) -> RequestError:
        """The same error for a request by name, if `lora_name` is not empty."""
        return AdapterNotKnown(lora_name, self.reason) if lora_name else self


class AdapterNotKnown(RequestError):
    """No adapter has the name."""

    code = "NOT_FOUND"

    def __init__(self, lora_name: str, reason: str = "") -> None:
        super().__init__(
            f"LoRA adapter {lora_name!r} not found in cache. Please send LoRA weights with request, under this name"
            + (f" ({reason})" if reason else "")
        )


class AdapterVersionNotFound(RequestError):
    """The adapter that would answer is another version than the request demands."""

    code = "NOT_FOUND"

    def __init__(self, lora_task_id: object, lora_name: str, expected: str, found: str) -> None:
        name = f" {lora_name!r}" if lora_name else ""
        super().__init__(
            f"LoRA task {lora_task_id}{name} has the digest {found} and lora_expected_digest is {expected}: the server "
            "does not have this version under this name"
        )


class AdapterNotHere(RequestError):
    """An operator names an adapter that no tier has. The text does not ask for weights, which an operator does not
    have.
    """

    code = "NOT_FOUND"

    def __init__(self, adapter: str) -> None:
        super().__init__(
            f"{adapter} not found in cache: no tier has it. The operation list tells which adapters there are; load "
            "fetches one from a source"
        )


class AdapterConflict(RequestError):
    """The task id is cached with other weights, and `lora_on_conflict` is `refuse`."""

    code = "ALREADY_EXISTS"

    def __init__(self, lora_task_id: object, cached_digest: str, sent_digest: str) -> None:
        super().__init__(
            f"LoRA task {lora_task_id} is cached with other weights (cached {cached_digest[:12]}, sent "
            f"{sent_digest[:12]}). Use another task id, or set lora_on_conflict to replace"
        )


class AdapterVersionChanged(RequestError):
    """An operator expects the adapter to be another version than it is."""

    code = "ALREADY_EXISTS"

    def __init__(self, lora_task_id: object, lora_name: str, expected: str, present: str) -> None:
        name = f" {lora_name!r}" if lora_name else ""
        found = f"has the digest {present}" if present else "is not cached"
        super().__init__(
            f"LoRA task {lora_task_id}{name} {found} and the expected digest is {expected}: nothing was changed"
        )


class FetchConflict(RequestError):
    """An operator wants an adapter from one source while it is on its way and may come from another one."""

    code = "ALREADY_EXISTS"

    def __init__(self, lora_task_id: object, lora_name: str, under_way: str, wanted: str) -> None:
        name = f" {lora_name!r}" if lora_name else ""
        source = f"source {under_way!r}" if under_way else "the first source that has it"
        super().__init__(
            f"LoRA task {lora_task_id}{name} is on its way from {source}: when it is there unload it, and load it from "
            f"{wanted!r} again"
        )


class AliasConflict(AdapterConflict):
    """A name would be that of an adapter and that of an alias. A name has one meaning."""

    def __init__(self, message: str) -> None:
        RequestError.__init__(self, message)


class AliasVersionNotFound(RequestError):
    """A request demands a digest of an alias, and no member is known to have it."""

    code = "NOT_FOUND"

    def __init__(self, name: str, expected: str, digests: Mapping[str, str]) -> None:
        told = ", ".join(f"{member} {digest or 'is not cached'}" for member, digest in digests.items())
        super().__init__(
            f"no member of the alias {name!r} has the digest that lora_expected_digest demands, {expected}: {told}; if "
            "several members are not cached, load them first"
        )


class AliasNotKnown(RequestError):
    """An operator names an alias that the server does not have."""

    code = "NOT_FOUND"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no alias {name!r}; the operation list tells which aliases there are")


class Unsupported(RequestError):
    """Well-formed, but something this server does not do."""

    code = "UNSUPPORTED"


class Unavailable(RequestError):
    """Nothing is wrong with the request; there is no room for it now."""

    code = "UNAVAILABLE"


class AdapterCacheFull(Unavailable):
    """Existing clients match `PEFT Cache is full. Could not store taskId=N` or the sentence after it, and back off."""

    def __init__(
        self,
        lora_task_id: object,
        needed_pages: int,
        free_pages: int,
        evictable_pages: int,
        promised_pages: int,
        pages: int,
    ) -> None:
        super().__init__(
            f"PEFT Cache is full. Could not store taskId={lora_task_id}: Cache is full. There are no done tasks to "
            f"evict: it needs {needed_pages} pages, {free_pages} of {pages} are free and {evictable_pages} evictable, "
            f"{promised_pages} of them promised to others; requests in flight and pins hold the rest"
        )


class AdapterNotLoaded(Unavailable):
    """Copying an adapter from one tier to a faster one failed; the slower one still has it."""

    def __init__(self, lora_task_id: object, reason: str) -> None:
        super().__init__(f"LoRA task {lora_task_id} is cached and could not be used this time: {reason}")


class AdapterNotKept(Unavailable):
    """An uploaded adapter answers, but would not survive the engine: the disk tier cannot be written."""

    def __init__(self, lora_task_id: object, reason: str) -> None:
        super().__init__(f"LoRA task {lora_task_id} is cached in memory only: lora_cache_dir cannot keep it: {reason}")


class AdapterNotDeleted(Unavailable):
    """An unloaded adapter answers no more, but would after the next start: the disk tier cannot be written."""

    def __init__(self, lora_task_id: object, reason: str) -> None:
        super().__init__(
            f"LoRA task {lora_task_id} is unloaded from memory only: lora_cache_dir cannot lose its file: {reason}"
        )


class AliasNotKept(Unavailable):
    """The alias is as it was: the disk tier cannot be written."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the alias {name!r} is as it was: lora_cache_dir cannot keep the change: {reason}")


class TooManyUploads(Unavailable):
    """One client sends as many adapters at once as it may."""

    def __init__(self, num_uploads: int) -> None:
        super().__init__(f"{num_uploads} adapters of this client are being uploaded already")


class TooManyUploadBytes(Unavailable):
    """Clients without a name send as many bytes of adapters at once as one client with a name may at most."""

    def __init__(self, bytes_in_flight: int, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"the adapter has {num_bytes} bytes, {bytes_in_flight} of clients without a name are being uploaded "
            f"already, and together they may have {max_bytes}"
        )


class TooManyLogits(Unavailable):
    """The requests in flight at one model ask for more logits than they may."""

    def __init__(self, bytes_in_flight: int, num_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"the request asks for {num_bytes} bytes of logits, {bytes_in_flight} are in flight, and together they may "
            f"have {max_bytes}"
        )


class GuidesFull(Unavailable):
    """The guides of all requests in flight take all the memory that guides may."""

    def __init__(self, num_bytes: int, bytes_in_flight: int, max_bytes: int) -> None:
        super().__init__(
            f"the guide takes {num_bytes} bytes of memory, other guides in flight {bytes_in_flight}, and all together "
            f"may take {max_bytes}, half of it for small ones"
        )


class GuideTimeout(Unavailable):
    """A guide was not compiled in time: it is hard, or many others are compiled before it."""

    def __init__(self, num_bytes: int, timeout_s: float) -> None:
        super().__init__(
            f"the guide of {num_bytes} bytes was not compiled within {timeout_s:g} s; smaller guides go first"
        )


class QueueFull(Unavailable):
    """`max_queue_size` requests are waiting already."""

    def __init__(self, num_waiting: int, max_queue_size: int, oldest_wait_s: float) -> None:
        super().__init__(
            f"the queue is full: {num_waiting} requests are waiting and max_queue_size is {max_queue_size}; the oldest "
            f"has waited {oldest_wait_s:.1f} s"
        )


class QueueShareFull(Unavailable):
    """One client has as many requests waiting or running as half of `max_queue_size` allows."""

    def __init__(self, num_requests: int, max_requests: int) -> None:
        super().__init__(
            f"this client's share of the queue is full: {num_requests} of its requests wait or run, and {max_requests} "
            "may (half of max_queue_size)"
        )


class RateExceeded(Unavailable):
    """An API key has used up its requests or tokens of a minute."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, unit: str, per_minute: int, wait_s: float) -> None:
        super().__init__(
            f"this API key may cause {per_minute} {unit} a minute, which are used up; come back in {wait_s:.1f} s"
        )


class EngineUnavailable(Unavailable):
    """The engine process died or has not finished starting."""


class UnpackedWeightsFull(Unavailable):
    """Memory does not hold the floats of weights that an operator asks for."""

    def __init__(self, num_weights: int, num_bytes: int, bytes_in_use: int, bytes_left: int) -> None:
        super().__init__(
            f"the floats of {num_weights} weights take {num_bytes} bytes, those of others {bytes_in_use}, and weights, "
            f"KV cache and adapters leave {bytes_left} more; pack others first, unpack fewer, or start the server with "
            "a smaller kv_cache_memory_bytes"
        )


class WeightsBusy(Unavailable):
    """An operator switches weights while others are being unpacked."""

    def __init__(self) -> None:
        super().__init__("other weights are being unpacked; try again when that is answered")


class SourceUnavailable(Unavailable):
    """A source cannot tell whether it has an adapter, or cannot deliver it now."""

    def __init__(self, adapter: str, source: str, reason: str) -> None:
        super().__init__(f"LoRA adapter {adapter!r} cannot be had from source {source!r} now: {reason}")


class Unauthenticated(RequestError):
    """The server has API keys, and the request came with none of them."""

    code = "UNAUTHENTICATED"

    def __init__(self) -> None:
        super().__init__(
            "no valid API key: send the header `authorization: Bearer KEY`; over HTTP generate, where Triton passes no "
            "header on, send it in the body"
        )


class PermissionDenied(RequestError):
    """The API key is valid and does not permit the request."""

    code = "PERMISSION_DENIED"


class Cancelled(RequestError):
    """The client, a `stop` request or the deadline ended the request."""

    code = "CANCELLED"


class InternalError(RequestError):
    """A fault of ours: a step failed, and the requests that were in it are lost; or the work of one request did."""

    code = "INTERNAL"


class RelayedError(RequestError):
    """An error of the engine process, as its front knows it: a code and a message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
