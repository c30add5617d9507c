from __future__ import annotations

import pytest

from multilora_engine.errors import InvalidRequest, PermissionDenied
from multilora_engine.process.messages import Stop
from multilora_engine.process.routes import Route, Routes
from multilora_engine.request import Sender

ACME, OTHER, UNKNOWN = Sender(name="acme"), Sender(name="other"), Sender()


def route(sender: Sender, client_request_id: str, call_id: str, front: bytes = b"front") -> Route:
    return Route(front, call_id, client_request_id, sender, task_id=None, trace_id="")


def named(routes: Routes, sender: Sender, wanted: str, needs_sender: bool = False) -> list[str]:
    return routes.named_by(Stop("stop", wanted, sender), needs_sender)


def test_a_known_sender_stops_all_its_requests_of_an_id_and_no_one_elses() -> None:
    routes = Routes(a=route(ACME, "x", "a"), b=route(ACME, "x", "b"), c=route(OTHER, "x", "c"), d=route(ACME, "y", "d"))
    assert named(routes, ACME, "x", needs_sender=True) == ["a", "b"]
    assert named(routes, OTHER, "x") == ["c"]
    assert named(routes, ACME, "z") == []


def test_the_engines_id_names_a_request_to_its_sender_alone() -> None:
    routes = Routes(a=route(ACME, "x", "a"), b=route(UNKNOWN, "x", "b"))
    assert named(routes, ACME, "a") == ["a"]
    assert named(routes, OTHER, "a") == []
    assert named(routes, UNKNOWN, "b", needs_sender=True) == ["b"]


def test_an_unknown_sender_stops_the_requests_of_one_call_and_is_refused_for_several() -> None:
    routes = Routes(a=route(UNKNOWN, "x", "a"), b=route(UNKNOWN, "x", "a"))
    assert named(routes, UNKNOWN, "x") == ["a", "b"]
    routes["c"] = route(UNKNOWN, "x", "c")
    with pytest.raises(InvalidRequest, match="several requests in flight have the id 'x'"):
        named(routes, UNKNOWN, "x")
    with pytest.raises(PermissionDenied, match="name the stop_id"):
        named(routes, UNKNOWN, "x", needs_sender=True)


def test_requests_that_have_ended_are_named_no_more() -> None:
    routes = Routes(a=route(ACME, "x", "a"), b=route(ACME, "x", "b"), c=route(ACME, "x", "c"))
    assert routes.pop("a", None) is not None
    assert routes.pop("a", None) is None
    assert named(routes, ACME, "x") == ["b", "c"]
    del routes["c"]
    assert named(routes, ACME, "x") == ["b"]
    del routes["b"]
    assert named(routes, ACME, "x") == []
    assert list(routes) == []


def test_the_requests_of_a_front_are_found() -> None:
    routes = Routes(a=route(ACME, "", "a", b"one"), b=route(ACME, "", "b", b"two"), c=route(OTHER, "", "c", b"one"))
    assert routes.of_front(b"one") == ["a", "c"]
