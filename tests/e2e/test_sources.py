"""Adapters that the server finds by itself, in a directory that its operator gave it."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from support.openai_front import openai_front
from support.oracle import Oracle
from transformers import AutoModelForCausalLM, AutoTokenizer

from multilora_client import (
    Adapter,
    AdapterConflict,
    AdapterNotFound,
    Client,
    InvalidRequest,
    NotFound,
    load_adapter,
)
from multilora_client.openai.catalogue import Catalogue
from multilora_engine.tritonserver import ServerProcess

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


PARROT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}Parrot{{ mood }}:"


def test_a_folders_template_and_end_tokens_count_at_grpc_http_and_openais_door(
    client: Client, http_client: Client, server: ServerProcess, default_model_dir: Path, tmp_path: Path
) -> None:
    chat: Any = [{"role": "user", "content": "Who are you?"}]
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)

    def prompt(**more: Any) -> list[int]:
        ids = tokenizer.apply_chat_template(chat, chat_template=PARROT, return_dict=False, **more)
        return list(ids)

    folder = shutil.copytree(SAMPLES / "pirate", tmp_path / "parrot")
    (folder / "chat_template.jinja").write_text(PARROT)
    talks = load_adapter(folder, 2001)
    client.upload(talks)
    answer = client.generate(input_ids=prompt(), adapter=2001, max_tokens=24)
    end = next(t for i, t in enumerate(answer.token_ids) if i >= 3 and t not in answer.token_ids[:i])
    length = answer.token_ids.index(end)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, tokenizer.eos_token_id]}))
    stops = load_adapter(folder, 2002)
    for asked in (client, http_client):
        told = asked.generate(messages=chat, adapter=talks, max_tokens=24)
        assert (told.text, told.num_input_tokens) == (answer.text, len(prompt()))
        told = asked.generate(messages=chat, adapter=stops, max_tokens=24)
        assert (told.token_ids, told.finish_reason) == (answer.token_ids[: length + 1], "stop")
    said = "".join(piece.text for piece in client.stream(messages=chat, adapter=stops, max_tokens=24))
    assert answer.text.startswith(said)
    catalogue = Catalogue("base", {"talks": talks, "stops": stops})
    with (
        openai_front(catalogue, server.grpc_url) as url,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0) as user,
    ):
        options: Any = {"messages": chat, "max_tokens": 24, "temperature": 0}
        whole = user.chat.completions.create(model="talks", **options)
        assert whole.choices[0].message.content == answer.text
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(prompt())
        moody: Any = {"chat_template_kwargs": {"mood": " laughs"}}
        other = user.chat.completions.create(model="talks", extra_body=moody, **options)
        assert other.usage is not None
        assert other.usage.prompt_tokens == len(prompt(mood=" laughs"))
        ended = user.chat.completions.create(model="stops", **options)
        assert (ended.choices[0].message.content, ended.choices[0].finish_reason) == (said, "stop")
        streamed = [*user.chat.completions.create(model="stops", stream=True, **options)]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == said
        told_at_once = user.responses.create(
            model="stops", input="Who are you?", max_output_tokens=24, temperature=0, store=False
        )
        assert (told_at_once.output_text, told_at_once.status) == (said, "completed")
