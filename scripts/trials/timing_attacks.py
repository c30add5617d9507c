"""Facts that a tenant may learn of another by the time of answers: rows for a table of abuse.

The attacker asks in pairs, in changing order: for an object that another tenant has, and for one that no tenant has. It
tells them apart as well as the chance that the first takes longer than the second differs from a half (Mann and
Whitney's U over the number of pairs). The attacker has both tenants' keys here, so that it can arrange the other
tenant's objects.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from trials.doors import GRPC_OPTIONS, TIMEOUT_S, Attack, Doors, Leak, infer_request

TENANTS = {name: f"the secret key of {name}" for name in ("victim", "attacker")}
"""API keys by their tenants."""

MAX_ADVANTAGE = 0.2
"""The largest distance of the chance from a half: with 40 pairs a fair coin is farther in two of a thousand runs."""

_NUM_ERRORS, _NUM_UPLOADS, _NUM_PROMPTS = 60, 40, 40
_RANK = 8
_ATTENTION_OUT = 4
_NUM_WORDS = 80

Ask = Callable[[str, service_pb2.ModelInferRequest], None]
"""Sends a request with the key of a tenant, and waits for the answer."""


def learn_of_adapters_by_errors(doors: Doors) -> str:
    """Whether an id that another tenant has is not found in another time than an id that no tenant has."""

    def arrange(ask: Ask, number: int) -> tuple[service_pb2.ModelInferRequest, service_pb2.ModelInferRequest]:
        if number == 0:
            ask("victim", _upload(_VICTIMS_ADAPTER, seed=0))
        return _use(_VICTIMS_ADAPTER), _use(_VICTIMS_ADAPTER + 1)

    return _compare(doors, arrange, _NUM_ERRORS)


def learn_of_weights_by_uploads(doors: Doors) -> str:
    """Whether weights that another tenant has sent are taken in another time than weights that no tenant has."""

    def arrange(ask: Ask, number: int) -> tuple[service_pb2.ModelInferRequest, service_pb2.ModelInferRequest]:
        task = _VICTIMS_ADAPTER + 10 + 2 * number
        ask("victim", _upload(task, seed=task))
        return _upload(task, seed=task), _upload(task + 1, seed=task + 1)

    return _compare(doors, arrange, _NUM_UPLOADS)


def learn_of_prompts_by_first_tokens(doors: Doors) -> str:
    """Whether the first token of a prompt that another tenant has asked comes in another time than a new one's."""

    def arrange(ask: Ask, number: int) -> tuple[service_pb2.ModelInferRequest, service_pb2.ModelInferRequest]:
        known, new = (_first_token(_prompt(f"{number} {kind}")) for kind in ("known", "new"))
        ask("victim", known)
        return known, new

    return _compare(doors, arrange, _NUM_PROMPTS)


TIMING_ATTACKS: Mapping[str, Attack] = {
    "time of an error: does another tenant have this adapter?": learn_of_adapters_by_errors,
    "time of an upload: does another tenant have these weights?": learn_of_weights_by_uploads,
    "time to a first token: has another tenant asked this?": learn_of_prompts_by_first_tokens,
}
"""The attacks by their names in a table."""

_VICTIMS_ADAPTER = 7_000_000


def chance_of_longer(first: Sequence[float], second: Sequence[float]) -> float:
    """The chance that a time of `first` is longer than one of `second`; equal ones count a half."""
    return statistics.fmean((a > b) + 0.5 * (a == b) for a in first for b in second)


def judge(known: Sequence[float], new: Sequence[float]) -> str:
    """The result of times in seconds, in words. Raises Leak."""
    chance = chance_of_longer(known, new)
    medians = " and ".join(f"{1e3 * statistics.median(times):.1f}" for times in (known, new))
    text = f"medians {medians} ms, the other tenant's longer with chance {chance:.2f}"
    if abs(chance - 0.5) > MAX_ADVANTAGE:
        raise Leak(text)
    return text


def _compare(
    doors: Doors,
    arrange: Callable[[Ask, int], tuple[service_pb2.ModelInferRequest, service_pb2.ModelInferRequest]],
    num_pairs: int,
) -> str:
    """arrange: makes a pair of requests: for something that the victim has, and for something that no tenant has."""
    order = random.Random(7)
    times: tuple[list[float], list[float]] = ([], [])
    with grpc.insecure_channel(doors.grpc_url, GRPC_OPTIONS) as channel:
        ask = partial(_ask, GRPCInferenceServiceStub(channel))
        for number in range(num_pairs):
            pair = arrange(ask, number)
            for i in order.sample((0, 1), 2):
                start = time.perf_counter()
                ask("attacker", pair[i])
                times[i].append(time.perf_counter() - start)
    return judge(*times)


def _ask(stub: GRPCInferenceServiceStub, tenant: str, request: service_pb2.ModelInferRequest) -> None:
    doors = Doors("", "", key=TENANTS[tenant])
    try:
        stub.ModelInfer(request, timeout=TIMEOUT_S, metadata=[*doors.headers.items()])
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.NOT_FOUND:  # the error that the attack times
            raise


def _upload(task: int, seed: int) -> Any:
    """An adapter on the attention's output of the default model's first layer."""
    weights = np.random.default_rng(seed).standard_normal((1, 1, _RANK * 2 * 576)).astype(np.float32)
    return infer_request(
        "generation_unary",
        lora_task_id=np.array([[task]], np.uint64),
        lora_weights_fp32=weights,
        lora_config=[[[_ATTENTION_OUT, 0, _RANK]]],
    )


def _use(task: int) -> Any:
    return infer_request(
        "generation_unary", text_input=[["Hello"]], max_tokens=[[1]], lora_task_id=np.array([[task]], np.uint64)
    )


def _first_token(prompt: str) -> Any:
    return infer_request("generation_unary", text_input=[[prompt]], max_tokens=[[1]])


def _prompt(seed: str) -> str:
    """Words in an order that no other seed has, from the first on."""
    words = ["sea", "ship", "wind", "rain", "bird", "tree", "road", "song"]
    return " ".join(random.Random(seed).choices(words, k=_NUM_WORDS))
