"""Adapters that the server finds by itself, in a directory that its operator gave it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.oracle import Oracle
from transformers import AutoModelForCausalLM, AutoTokenizer

from multilora_client import Adapter, AdapterConflict, AdapterNotFound, Client, InvalidRequest, NotFound

SAMPLES = Path(__file__).parents[2] / "adapters"


def location_of(client: Client, name: str) -> str:
    (location,) = (adapter.location for adapter in client.list_adapters() if adapter.name == name)
    return location


def test_an_adapter_that_nobody_sent_answers_by_its_name_as_peft_does(
    client: Client, default_model_dir: Path, tmp_path: Path
) -> None:
    chat = [{"role": "user", "content": "Who are you?"}]
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with suppress(NotFound):  # another test of this server may have asked for it
        client.unload_adapter("pirate")
    assert location_of(client, "pirate") == "REMOTE"
    answer = client.generate(input_ids=prompt, lora_name="pirate", max_tokens=16)
    assert location_of(client, "pirate") in ("HOST", "DEVICE")
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32), tmp_path)
    oracle.load("pirate", SAMPLES / "pirate")
    assert answer.token_ids == oracle.logits("pirate", prompt, answer.token_ids).argmax(dim=-1).tolist()
    assert answer.token_ids != client.generate(input_ids=prompt, max_tokens=16).token_ids
    assert answer.token_ids == [
        t for c in client.stream(input_ids=prompt, adapter=answer.lora_task_id, max_tokens=16) for t in c.token_ids
    ]


def test_an_adapter_is_loaded_before_anybody_asks_for_it(client: Client, http_client: Client) -> None:
    loaded = http_client.load_adapter("json", source="directory")
    assert (loaded.name, loaded.ranks) == ("json", (8,))
    assert client.generate("{", lora_name="json", max_tokens=1).lora_digest == loaded.digest


def test_what_no_source_has_is_not_found_and_what_is_no_name_is_refused(client: Client, http_client: Client) -> None:
    for asked in (client, http_client):
        with pytest.raises(AdapterNotFound, match=r"'nobody' not found in cache\. .*directory: no such folder"):
            asked.generate("Hello", lora_name="nobody", max_tokens=1)
        with pytest.raises(InvalidRequest, match=r"lora_name '\.\./adapters/pirate' is not plain"):
            asked.generate("Hello", lora_name="../adapters/pirate", max_tokens=1)
    with pytest.raises(AdapterNotFound, match="'nobody' not found in cache"):
        list(client.stream("Hello", lora_name="nobody", max_tokens=1))


def test_an_adapter_loaded_by_its_path_answers_by_its_new_name(
    client: Client, http_client: Client, pirate: Adapter, tmp_path: Path
) -> None:
    loaded = http_client.load_adapter("polly", path=str(SAMPLES / "pirate"))
    assert (loaded.name, loaded.location) == ("polly", "HOST")
    chat = [{"role": "user", "content": "Who are you?"}]
    answer = client.generate(messages=chat, lora_name="polly", max_tokens=8)
    assert (answer.lora_task_id, answer.lora_digest) == (loaded.lora_task_id, loaded.digest)
    assert answer.text == client.generate(messages=chat, adapter=pirate, max_tokens=8).text
    with pytest.raises(AdapterConflict, match="is cached with other weights"):
        client.load_adapter("polly", path=str(SAMPLES / "json"))
    for path in (tmp_path, SAMPLES / ".." / "adapters" / "pirate"):
        with pytest.raises(InvalidRequest, match=r"none of the sources asked \(directory\) covers it"):
            client.load_adapter("spy", path=str(path))
