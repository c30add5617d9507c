"""The hub source against a server on loopback that speaks the part of the hub's API that downloads need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download
from support.adapters import TINY
from support.sources import MAX_BYTES, NO_BASE, USE, USE_FILES, digest_of, key, save_adapter

from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.sources.hub import HubSource
from multilora_engine.lora.sources.packing import pack_directory
from multilora_engine.lora.sources.source import AdapterKey, NotThere, Unreachable, Unusable
from multilora_wire.adapter_use import parse_use

WEIGHTS = "adapter_model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """repos: name -> file -> content. claimed_sha256: what it says of the weights instead of the truth.

    is_down: every answer is 503. break_after: once, the line goes dead after so many bytes of the weights.
    asked: (method, path) of the requests so far; of a download from the middle, with where it begins.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.claimed_sha256: str | None = None
        self.is_down = False
        self.break_after: int | None = None
        self.asked: list[tuple[str, str]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def described(self, name: str, content: bytes) -> dict[str, object]:
        """A file as the hub's two listings have it; weights are large files (LFS), the rest is not."""
        entry: dict[str, object] = {"type": "file", "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if name.endswith((".safetensors", ".bin")):
            sha256 = self.claimed_sha256 or hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(content), "pointerSize": 130}
        return entry | {"path": name, "rfilename": name, "blobId": entry["oid"]}


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def _answer(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append((self.command, path))
        parts = path.strip("/").split("/")
        is_api = parts[0] == "api"
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        files = self.server.repos.get(repo)
        if self.server.is_down:
            self._send(503, b"")
        elif files is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif not is_api:
            self._send_file(parts[-1], files)
        elif "tree" in parts:
            self._send(200, json.dumps([self.server.described(*file) for file in files.items()]).encode())
        else:
            siblings = [self.server.described(*file) for file in files.items()]
            self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

    def _send_file(self, name: str, files: dict[str, bytes]) -> None:
        content, headers = files[name], {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"'}
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        if begin:
            self.server.asked.append(("GET", f"{name} from {begin}"))
        self._send(206 if begin else 200, content[begin:], headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.break_after is not None and len(body) > self.server.break_after:
            body, self.server.break_after, self.close_connection = body[: self.server.break_after], None, True
        self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with the repositories acme/pirate (seed 1) and evil/secret."""
    hub = FakeHub()
    for seed, repo in ((1, "acme/pirate"), (66, "evil/secret")):
        folder = save_adapter(tmp_path / "made" / str(seed), seed)
        hub.repos[repo] = {path.name: path.read_bytes() for path in folder.iterdir()} | {"README.md": b"# Ahoy"}
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


@pytest.fixture
def source(hub: FakeHub, tmp_path: Path) -> HubSource:
    return HubSource(["acme/*"], endpoint=hub.endpoint, cache_dir=str(tmp_path / "cache"))


def fetch(source: HubSource, wanted: AdapterKey, max_bytes: int = MAX_BYTES) -> tuple[str, str]:
    """(revision, digest) of an adapter as the source gives it."""
    with source.open(wanted, max_bytes) as adapter:
        return adapter.revision, pack_directory(adapter, TINY, NO_BASE).digest


def test_a_repository_is_an_adapter_and_only_its_files_are_downloaded(source: HubSource, hub: FakeHub) -> None:
    assert fetch(source, key("acme/pirate")) == (COMMIT, digest_of(1))
    downloaded = {path.rsplit("/", 1)[-1] for _, path in hub.asked if "/resolve/" in path}
    assert downloaded == {"adapter_config.json", WEIGHTS}


def test_what_a_repository_says_of_the_use_is_read_also_from_the_cache(
    source: HubSource, hub: FakeHub, reader: UseReader
) -> None:
    hub.repos["acme/pirate"] |= {name: text.encode() for name, text in USE_FILES.items()}
    for hub.is_down in (False, True):
        with source.open(key("acme/pirate"), MAX_BYTES) as adapter:
            packed = pack_directory(adapter, TINY, NO_BASE, reader)
        assert parse_use(packed.traits.use) == USE
        assert packed.digest != digest_of(1)


def test_the_cache_answers_when_the_hub_does_not(source: HubSource, hub: FakeHub) -> None:
    fetch(source, key("acme/pirate"))
    hub.is_down = True
    assert fetch(source, key("acme/pirate")) == (COMMIT, digest_of(1))
    with pytest.raises(Unreachable, match=r"the hub cannot be asked, and 'acme/nobody' is not in the local cache"):
        fetch(source, key("acme/nobody"))


def test_files_that_others_downloaded_answer_alone_only_where_the_operator_has_gone_offline(
    source: HubSource, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["acme/pirate"] |= {name: text.encode() for name, text in USE_FILES.items()}
    for name in ("adapter_config.json", WEIGHTS):  # as PEFT does
        hf_hub_download("acme/pirate", name, endpoint=hub.endpoint, cache_dir=tmp_path / "cache")
    hub.is_down = True
    with pytest.raises(Unreachable, match="may have only a part of 'acme/pirate'; ask again"):
        fetch(source, key("acme/pirate"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch(source, key("acme/pirate")) == (COMMIT, digest_of(1))


def test_an_interrupted_download_is_continued_where_it_broke_off(
    source: HubSource, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.break_after = 5000
    assert fetch(source, key("acme/pirate")) == (COMMIT, digest_of(1))
    assert ("GET", f"{WEIGHTS} from 5000") in hub.asked


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (key("evil/secret"), r"repository 'evil/secret' is not allowed, only acme/\*"),
        (key("pirate"), "'pirate' is not the name of a repository, OWNER/NAME"),
        (AdapterKey(7), "'7' is not the name of a repository"),
    ],
)
def test_what_the_operator_has_not_allowed_is_not_even_asked_for(
    source: HubSource, hub: FakeHub, wanted: AdapterKey, reason: str
) -> None:
    with pytest.raises(NotThere, match=reason):
        fetch(source, wanted)
    assert hub.asked == []


def test_a_repository_that_is_not_there_is_not_there(source: HubSource) -> None:
    with pytest.raises(NotThere, match="there is no repository 'acme/nobody'"):
        fetch(source, key("acme/nobody"))


def test_an_adapter_that_is_too_large_is_refused_before_it_is_downloaded(source: HubSource, hub: FakeHub) -> None:
    with pytest.raises(Unusable, match="more than the 1000 that an adapter of this model can have"):
        fetch(source, key("acme/pirate"), max_bytes=1000)
    assert not any("/resolve/" in path for _, path in hub.asked)


def test_a_pickle_is_refused_before_it_is_downloaded(source: HubSource, hub: FakeHub) -> None:
    files = hub.repos["acme/pirate"]
    files["adapter_model.bin"] = files.pop(WEIGHTS)
    with pytest.raises(Unusable, match=r"adapter_model.bin is a pickle"):
        fetch(source, key("acme/pirate"))
    assert not any("/resolve/" in path for _, path in hub.asked)


def test_weights_with_another_checksum_than_the_hubs_are_refused(source: HubSource, hub: FakeHub) -> None:
    hub.claimed_sha256 = "ab" * 32
    with pytest.raises(Unusable, match=f"{WEIGHTS} arrived damaged: its SHA-256 is .*, the hub says abababababab"):
        fetch(source, key("acme/pirate"))


def test_a_repository_that_a_pattern_allows_is_a_path_and_its_adapter_has_no_name_of_its_own(source: HubSource) -> None:
    assert source.covers("acme/pirate")
    with source.open_path("acme/pirate", MAX_BYTES) as adapter:
        assert (adapter.name, pack_directory(adapter, TINY, NO_BASE).digest) == ("", digest_of(1))


@pytest.mark.parametrize(
    "path", ["evil/secret", "acme/../evil", "acme/pirate/x", "acme/", "acme", "/acme/pirate", "acme/a b"]
)
def test_what_is_no_repository_or_not_allowed_is_not_covered_and_not_asked_for(
    source: HubSource, hub: FakeHub, path: str
) -> None:
    assert not source.covers(path)
    assert hub.asked == []
