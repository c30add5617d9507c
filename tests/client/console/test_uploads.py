"""An adapter's files, as the page sends them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from multilora_client import AdapterTensors, adapter, convert_peft
from multilora_client.console.settings import ConsoleSettings
from multilora_client.console.state import MAX_UPLOADS_AT_ONCE
from multilora_client.convert import content_task_id
from multilora_client.errors import AdapterConflict
from multilora_wire.adapter_names import task_id_of_name
from multilora_wire.sites import decoder_sites

PEFT = ("adapter_config.json", "adapter_model.safetensors")
CONVERTED = ("model.lora_config.npy", "model.lora_weights.npy")


def send(console: TestClient, folder: Path, *names: str, body: bytes | None = None, **query: Any) -> Any:
    contents = {name: (folder / name).read_bytes() for name in names}
    files = [f"{name}:{len(content)}" for name, content in contents.items()]
    sent = b"".join(contents.values()) if body is None else body
    return console.post("/api/uploads", params={"file": files, **query}, content=sent)


def lines(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which uploads lie for a while."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def peft(save_adapter: Callable[..., Any]) -> Path:
    directory: Path = save_adapter().directory
    return directory


def test_a_peft_folder_goes_as_it_is(console: TestClient, server: Any, peft: Path, scratch: Path) -> None:
    told = lines(send(console, peft, *PEFT, lora_name="acme/pirate"))

    contents = [(peft / name).read_bytes() for name in PEFT]
    assert told[0] == {"phase": "sending", "bytes": sum(map(len, contents))}
    task_id = task_id_of_name("acme/pirate")
    assert told[-1] == {"phase": "done", "lora_task_id": str(task_id), "lora_digest": "ab" * 32}
    inputs = server.inputs()
    assert (inputs["lora_name"], inputs["lora_task_id"]) == (["acme/pirate"], [task_id])
    assert inputs["lora_peft_config"] == [contents[0].decode()]
    assert bytes(inputs["lora_peft_weights"]) == contents[1]
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(("query", "named"), [({}, None), ({"lora_task_id": str(2**64 - 1)}, 2**64 - 1)])
def test_upstreams_pair_goes_as_it_is(
    console: TestClient,
    server: Any,
    small_tensors: AdapterTensors,
    tmp_path: Path,
    query: dict[str, str],
    named: int | None,
) -> None:
    small_tensors.save(tmp_path)
    told = lines(send(console, tmp_path, *CONVERTED, **query))

    task_id = content_task_id(small_tensors) if named is None else named
    assert told[-1]["lora_task_id"] == str(task_id)
    assert server.inputs()["lora_task_id"] == [task_id]
    assert np.array_equal(server.inputs()["lora_weights"], small_tensors.weights.ravel())


def is_in_an_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("query", [{}, {"lora_task_id": "7"}, {"lora_name": "acme/pirate"}])
def test_others_are_answered_while_an_adapter_is_read_and_hashed(
    console: TestClient,
    small_tensors: AdapterTensors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    query: dict[str, str],
) -> None:
    small_tensors.save(tmp_path)
    blocked: dict[str, bool] = {}
    load = AdapterTensors.load

    def watched_load(directory: Path) -> AdapterTensors:
        blocked["load"] = is_in_an_event_loop()
        return load(directory)

    def watched_sha256(data: bytes) -> Any:
        blocked["hash"] = blocked.get("hash", False) or is_in_an_event_loop()
        return hashlib.sha256(data)

    monkeypatch.setattr(AdapterTensors, "load", watched_load)
    monkeypatch.setattr(adapter, "hashlib", SimpleNamespace(sha256=watched_sha256))

    assert lines(send(console, tmp_path, *CONVERTED, **query))[-1]["phase"] == "done"
    assert blocked == {"load": False, "hash": False}


@pytest.mark.parametrize(
    "file",
    [
        "../adapter_config.json:1",
        "/etc/passwd:1",
        "adapter_model.bin:1",
        "adapter_config.json",
        "adapter_config.json:-1",
        "adapter_config.json:1:2",
        "adapter_config.json\x00:1",
        "sub/adapter_config.json:1",
    ],
)
def test_no_other_file_than_an_adapters_is_taken(console: TestClient, scratch: Path, file: str) -> None:
    refused = console.post("/api/uploads", params={"file": [file]}, content=b"x")

    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("body", [b"", b"x" * 9, b"x" * 11])
def test_a_body_that_is_not_its_files_is_refused(console: TestClient, scratch: Path, body: bytes) -> None:
    refused = console.post("/api/uploads", params={"file": ["adapter_config.json:10"]}, content=body)

    assert refused.status_code == 400
    assert list(scratch.iterdir()) == []


def test_more_bytes_than_allowed_are_refused_before_and_while_they_come(
    open_console: Callable[..., TestClient], scratch: Path
) -> None:
    console = open_console(ConsoleSettings(max_upload_bytes=1000))
    told = console.post("/api/uploads", params={"file": ["adapter_config.json:1001"]}, content=b"x")
    lied = console.post("/api/uploads", params={"file": ["adapter_config.json:10"]}, content=b"x" * 2000)

    assert (told.status_code, lied.status_code) == (413, 413)
    assert list(scratch.iterdir()) == []


def test_a_file_twice_and_two_ids_are_refused(console: TestClient) -> None:
    twice = {"file": ["adapter_config.json:1", "adapter_config.json:1"]}
    assert console.post("/api/uploads", params=twice, content=b"xx").status_code == 400
    both = {"file": ["adapter_config.json:1"], "lora_name": "a", "lora_task_id": "7"}
    assert console.post("/api/uploads", params=both, content=b"x").status_code == 400
    assert console.post("/api/uploads", content=b"x").status_code == 400


def test_nobody_without_a_key_has_the_console_take_a_body(console: TestClient, server: Any, peft: Path) -> None:
    server.key = "sesame, open yourself"
    assert send(console, peft, *PEFT).status_code == 401
    assert server.requests == []


def refusal(console: TestClient, folder: Path, *names: str) -> str:
    error: dict[str, str] = lines(send(console, folder, *names))[-1]["error"]
    return error["message"]


def test_a_pickle_is_never_read(console: TestClient, server: Any, tmp_path: Path) -> None:
    np.save(tmp_path / CONVERTED[1], np.array([{}], object), allow_pickle=True)
    np.save(tmp_path / CONVERTED[0], np.zeros((1, 1, 4), np.int32))

    assert "without pickled objects" in refusal(console, tmp_path, *CONVERTED)
    assert server.requests == []


def test_an_array_that_says_to_be_larger_than_its_file_takes_no_memory(
    console: TestClient, server: Any, tmp_path: Path
) -> None:
    for name in CONVERTED:
        with (tmp_path / name).open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (1, 1 << 20, 1 << 20)}
            np.lib.format.write_array_header_1_0(file, header)

    assert "is not a readable .npy array" in refusal(console, tmp_path, *CONVERTED)
    assert server.requests == []


def test_a_folder_without_weights_is_refused_without_paths(console: TestClient, peft: Path, scratch: Path) -> None:
    assert refusal(console, peft, PEFT[0]) == "adapter_model.safetensors is missing"
    assert str(scratch) not in refusal(console, peft, PEFT[1])


def test_uploads_at_once_are_few_and_free_their_places(console: TestClient, server: Any, peft: Path) -> None:
    for _ in range(MAX_UPLOADS_AT_ONCE + 1):
        assert "phase" in lines(send(console, peft, *PEFT))[-1]
        assert send(console, peft, *PEFT, body=b"x").status_code == 400


def test_the_servers_refusal_is_the_answers_last_line(console: TestClient, server: Any, peft: Path) -> None:
    server.errors[7] = AdapterConflict("LoRA task 7 is served with other weights")
    assert lines(send(console, peft, *PEFT, lora_task_id="7"))[-1]["error"]["code"] == "ALREADY_EXISTS"


def test_converted_files_of_another_model_are_refused_by_their_sides(
    console: TestClient, server: Any, peft: Path, tmp_path: Path
) -> None:
    sites = decoder_sites(num_layers=2, hidden_size=40, q_size=24, kv_size=4, intermediate_size=40)
    server.reports["layout"] = {"layout": {"sites": asdict(sites)}}
    convert_peft(peft).save(tmp_path / "converted")
    error = lines(send(console, tmp_path / "converted", *CONVERTED, "model.lora_origin.json"))[-1]["error"]
    assert error == {
        "code": "INVALID_ADAPTER",
        "message": "the adapter was made for another base model, not for tiny: model.layers.0.self_attn.q_proj has 24 "
        "inputs and 40 outputs there, 40 inputs and 24 outputs here",
    }
    assert server.requests == []
