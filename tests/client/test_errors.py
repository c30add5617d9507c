import inspect

import pytest

from multilora_client import errors
from multilora_client.errors import (
    AdapterConflict,
    AdapterNotFound,
    CacheFull,
    Cancelled,
    InvalidRequest,
    MultiloraClientError,
    NotFound,
    ServerFault,
    Unavailable,
    Unsupported,
    parse_error,
)

NOT_CACHED = "LoRA task 7 not found in cache. Please send LoRA weights with request"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARG", InvalidRequest),
        ("NOT_FOUND", NotFound),
        ("ALREADY_EXISTS", AdapterConflict),
        ("UNSUPPORTED", Unsupported),
        ("UNAVAILABLE", Unavailable),
        ("CANCELLED", Cancelled),
        ("INTERNAL", ServerFault),
        ("SOMETHING_NEW", MultiloraClientError),
    ],
)
def test_the_code_in_front_of_a_message_decides(code: str, kind: type[MultiloraClientError]) -> None:
    error = parse_error(f"[{code}] rank 65 is above 64 (request ab12)", status="OTHER")

    assert type(error) is kind
    assert (error.code, error.request_id, str(error)) == (code, "ab12", "rank 65 is above 64")


@pytest.mark.parametrize("prefix", ["", "in ensemble 'ensemble', ", "in ensemble 'outer', in ensemble 'inner', "])
def test_an_adapter_that_is_not_cached_is_recognised_behind_any_ensemble(prefix: str) -> None:
    error = parse_error(f"{prefix}[NOT_FOUND] {NOT_CACHED} (request r)")

    assert type(error) is AdapterNotFound
    assert (error.code, error.request_id, str(error)) == ("NOT_FOUND", "r", NOT_CACHED)


def test_servers_that_send_no_codes_are_understood_by_their_text() -> None:
    assert type(parse_error(f"Executor failed: {NOT_CACHED}", status="INTERNAL")) is AdapterNotFound


def test_a_full_cache_is_retryable_and_other_failures_are_not() -> None:
    full = parse_error("[UNAVAILABLE] Cache is full. There are no done tasks to evict: LoRA task 7 needs 3 pages")

    assert type(full) is CacheFull
    assert full.retryable
    assert not parse_error("[INVALID_ARG] no").retryable


def test_a_missing_model_is_not_taken_for_a_missing_adapter() -> None:
    error = parse_error("Request for unknown model: 'generation' is not found", status="NOT_FOUND")

    assert type(error) is NotFound


def test_without_a_code_or_an_id_in_the_text_those_of_the_request_hold() -> None:
    error = parse_error("it\nbroke (badly) (request -)", status="INTERNAL", request_id="mine")

    assert (error.code, error.request_id, str(error)) == ("INTERNAL", "mine", "it\nbroke (badly)")


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, MultiloraClientError)]
    depths = {kind.__name__: len(kind.__mro__) - len(MultiloraClientError.__mro__) for kind in kinds}
    drawn = [line for line in (errors.__doc__ or "").splitlines() if line.strip().split(" ")[0] in depths]

    assert {line.split()[0]: (len(line) - len(line.lstrip())) // 2 - 2 for line in drawn} == depths
