from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_client.errors import InvalidRequest
from multilora_client.keys import AdapterPatterns, Caller, KeyEntry, KeyRing, bearer_key, digest_of

KEY, OTHER = "k" * 16, "o" * 16


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"keys": entries}))
    return path


def test_a_key_is_known_by_itself_or_by_its_digest(tmp_path: Path) -> None:
    ring = KeyRing(
        write(tmp_path / "keys", {"key": KEY, "tenant": "acme"}, {"key_sha256": digest_of(OTHER), "tenant": "bolt"})
    )
    known = [ring.caller(key) for key in (KEY, OTHER)]
    assert [caller.tenant for caller in known if caller] == ["acme", "bolt"]
    assert ring.caller(digest_of(OTHER)) is None
    assert ring.caller("") is None
    assert ring.caller("\udcff" * 16) is None


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"tenant": "acme"}, "either key or key_sha256"),
        ({"key": KEY, "key_sha256": "0" * 64, "tenant": "acme"}, "either key or key_sha256"),
        ({"key": "k" * 15, "tenant": "acme"}, "15 characters, at least 16"),
        ({"key_sha256": "A" * 64, "tenant": "acme"}, "64 hexadecimal digits"),
        ({"key": KEY, "tenant": "../acme"}, "tenant is not plain"),
        ({"key": KEY, "tenant": "a@b"}, "tenant is not plain"),
        ({"key": KEY}, "may use nothing"),
        ({"key": KEY, "tenant": "acme", "upload": True, "adapters": ["*"]}, "every name would mean"),
        ({"key": KEY, "tenant": "acme", "uploads": True}, "unknown field `uploads`"),
        ({"key": KEY, "tenant": "acme", "requests_per_minute": 0}, "requests_per_minute"),
        ({"key": KEY, "tenant": "acme", "weight": 0}, "weight"),
        ({"key": KEY, "tenant": "acme", "adapters": "pirate"}, "adapters"),
        ({"key": KEY, "tenant": "acme", "adapters": [1.5]}, "adapters"),
    ],
)
def test_an_entry_that_cannot_be_meant_is_refused_and_no_key_quoted(
    tmp_path: Path, entry: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as error:
        KeyRing(write(tmp_path / "keys", entry))
    assert KEY not in str(error.value)


DEEP = b'{"x": ' + b"[" * 100_000


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"' + KEY.encode() + b'": ["*"]}', b"\xff", b'{"keys": 1}', DEEP]
)
def test_a_file_of_another_form_is_refused_with_the_form(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(InvalidRequest, match=r'write \{"keys": \[') as error:
        KeyRing(tmp_path / "keys")
    assert KEY not in str(error.value)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nokeys cannot be read: No such file"):
        KeyRing(tmp_path / "nokeys")


def test_the_same_key_twice_is_refused(tmp_path: Path) -> None:
    twice = {"key": KEY, "tenant": "acme"}, {"key_sha256": digest_of(KEY), "tenant": "bolt"}
    with pytest.raises(InvalidRequest, match="same API key twice"):
        KeyRing(write(tmp_path / "keys", *twice))


def test_a_changed_file_counts_from_the_next_question_on(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", {"key": KEY, "tenant": "acme"})
    ring = KeyRing(path)
    write(path, {"key": OTHER, "tenant": "acme"})
    assert ring.caller(KEY) is None
    assert ring.caller(OTHER) is not None
    replacement = write(tmp_path / "new", {"key": KEY, "tenant": "bolt"})
    replacement.replace(path)
    caller = ring.caller(KEY)
    assert caller is not None
    assert caller.tenant == "bolt"


def test_a_file_that_settled_is_read_again_when_its_time_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", {"key": KEY, "tenant": "acme"})
    os.utime(path, (1e9, 1e9))
    ring = KeyRing(path)
    write(path, {"key": OTHER, "tenant": "acme"})
    os.utime(path, (1e9 + 1, 1e9 + 1))
    assert ring.caller(KEY) is None


@pytest.mark.parametrize("content", [None, b"", b'{"keys": [{}]}'])
def test_a_file_that_breaks_keeps_the_last_keys_and_is_logged(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys", {"key": KEY, "tenant": "acme"})
    ring = KeyRing(path)
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert ring.caller(KEY) is not None
    assert len(caplog.messages) == 1
    assert "stay as they were" in caplog.messages[0]
    write(path, {"key": OTHER, "tenant": "acme"})
    assert ring.caller(KEY) is None


def test_patterns_are_ids_names_and_beginnings() -> None:
    patterns = AdapterPatterns((7, "pirate", "acme-*"))
    assert patterns.match(7)
    assert patterns.match(1, "pirate")
    assert patterns.match(1, "acme-")
    assert patterns.match(1, "acme-1")
    assert not patterns.match(1)
    assert not patterns.match(1, "pirates")
    assert not patterns.match(1, "xacme-1")
    assert not patterns.match(None)
    assert not AdapterPatterns(()).match(7, "pirate")
    assert AdapterPatterns(("*",)).match(7)


def test_an_id_alone_means_the_name_that_has_it() -> None:
    patterns = AdapterPatterns(("pirate",), id_of_name=len)
    assert patterns.match(6)
    assert not patterns.match(7)


@given(entries=st.lists(st.integers(0, 9) | st.text("ab*", min_size=1, max_size=3)), name=st.text("ab", max_size=3))
def test_patterns_agree_with_a_plain_reading(entries: list[int | str], name: str) -> None:
    def means(entry: int | str) -> bool:
        if isinstance(entry, int):
            return entry == 5
        if entry == "*":
            return True
        beginning = entry[:-1] if entry.endswith("*") else None
        return bool(name) and (name == entry if beginning is None else name[: len(beginning)] == beginning)

    assert AdapterPatterns(tuple(entries)).match(5, name) == any(map(means, entries))


def test_what_matches_is_the_servers_and_the_rest_the_tenants_own() -> None:
    caller = Caller(KeyEntry(key=KEY, tenant="acme", adapters=("pirate", 7), own_adapters=("mine-*", 8)))
    assert (caller.owner(1, "pirate"), caller.owner(7)) == ("", "")
    assert (caller.owner(1, "mine-1"), caller.owner(8), caller.owner(9)) == ("acme", "acme", "acme")
    assert [caller.may_use(1, name) for name in ("pirate", "mine-1", "other")] == [True, True, False]
    assert [caller.may_use(task) for task in (7, 8, 9)] == [True, True, False]


def test_a_key_without_tenant_means_the_servers_adapters_and_may_use_those_it_names() -> None:
    caller = Caller(KeyEntry(key=KEY, adapters=("pirate",)))
    assert caller.owner(9, "other") == ""
    assert caller.may_use(1, "pirate")
    assert not caller.may_use(9, "other")


@pytest.mark.parametrize(
    ("header", "key"),
    [(f"Bearer {KEY}", KEY), (f"bearer   {KEY} ", KEY), (KEY, ""), (f"Basic {KEY}", ""), ("", ""), ("Bearer", "")],
)
def test_a_key_comes_as_a_bearer_token(header: str, key: str) -> None:
    assert bearer_key(header) == key
