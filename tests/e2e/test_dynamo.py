"""The engine as a worker of a real Dynamo: its front, its router, and workers as processes."""

from __future__ import annotations

import http.client
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
from support.dynamo_fleet import DynamoFleet, Worker, call, is_healthy, tail

pytest.importorskip("dynamo.common.backend", reason="ai-dynamo is not installed")
pytestmark = pytest.mark.long(reason="a fleet takes half a minute to start; what it reads and writes has shorter tests")

MODEL = "smol"
PROMPT = "The capital of France is"
PARAMETERS = {"kv_cache_memory_bytes": "192MiB", "max_num_seqs": "16", "num_threads": "1"}
CANARY = {
    "DYN_HEALTH_CHECK_ENABLED": "true",
    "DYN_CANARY_WAIT_TIME": "1",
    "DYN_HEALTH_CHECK_REQUEST_TIMEOUT": "10",
}
"""An endpoint that has had nothing to do for a second is asked for a token, and must answer within ten."""

SAMPLE_ADAPTERS = Path(__file__).parents[2] / "adapters"
CHAT = [{"role": "user", "content": "Hello, how are you today? Tell me something."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a source of the worker covers."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def fleet(default_model_dir: Path, folder: Path) -> Iterator[DynamoFleet]:
    """A front and one worker."""
    sources = [
        {"source": "directory", "root": str(SAMPLE_ADAPTERS)},
        {"source": "directory", "name": "moving", "root": str(folder)},
    ]
    options = ("--router-mode", "kv", "--migration-limit", "3")
    with DynamoFleet(default_model_dir, MODEL, options, CANARY) as fleet:
        fleet.start_worker({**PARAMETERS, "lora_sources": json.dumps(sources)})
        fleet.wait_ready(1)
        yield fleet


@pytest.fixture(scope="module")
def worker(fleet: DynamoFleet) -> Worker:
    return fleet.workers[0]


def ask(fleet: DynamoFleet, **options: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **options}
    answer: dict[str, Any] = call(f"{fleet.url}/v1/completions", asked)
    return answer


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def chat(fleet: DynamoFleet, model: str, **options: Any) -> str:
    asked = {"model": model, "messages": CHAT, "max_tokens": 12, "temperature": 0, **options}
    return str(call(f"{fleet.url}/v1/chat/completions", asked)["choices"][0]["message"]["content"])


STORY = "Once upon a time there was a king who had three sons and a garden with a tree of golden apples. " * 2


def cached_tokens(fleet: DynamoFleet, model: str) -> int:
    """How much of a long prompt an adapter finds in the prefix cache."""
    told = ask(fleet, model=model, prompt=STORY, max_tokens=1)
    return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])


def load_lora(worker: Worker, name: str, folder: Path) -> dict[str, Any]:
    body = {"lora_name": name, "source": {"uri": folder.as_uri()}}
    answer: dict[str, Any] = call(f"{worker.system_url}/v1/loras", body)
    return answer


def test_tokens_are_those_of_the_engine(fleet: DynamoFleet, default_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(default_model_dir)
    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype="float32")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    answer = ask(fleet, logprobs=1, return_tokens_as_token_ids=True)
    assert answer["choices"][0]["logprobs"]["tokens"] == [f"token_id:{i}" for i in expected.tolist()]
    assert text(answer) == tokenizer.decode(expected)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 8)


def test_options_reach_the_engine(fleet: DynamoFleet) -> None:
    plain = text(ask(fleet))
    assert re.fullmatch("[0-9]{5}", text(ask(fleet, guided_regex="[0-9]{5}")))
    assert text(ask(fleet, guided_choice=["a.b", "c|d"])) in ("a.b", "c|d")
    stopped = ask(fleet, stop=["nswer"])
    assert (text(stopped), stopped["choices"][0]["finish_reason"]) == (plain[: plain.index("nswer")], "stop")
    kept = ask(fleet, stop=["nswer"], include_stop_str_in_output=True)
    assert text(kept) == plain[: plain.index("nswer") + len("nswer")]
    drawn = {"temperature": 1.0, "seed": 5, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.3}
    assert text(ask(fleet, **drawn)) == text(ask(fleet, **drawn)) != plain
    assert len(ask(fleet, prompt_logprobs=1)["choices"]) == 1


def test_json_of_a_schema_in_a_chat(fleet: DynamoFleet) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Give me JSON with an integer"}],
        "max_tokens": 40,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    answer = call(f"{fleet.url}/v1/chat/completions", asked)
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"a"}


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        ({"prompt": [5] * 20_000}, 400, "max_model_len"),
        ({"guided_regex": "("}, 400, "malformed"),
        ({"n": 2, "temperature": 1}, 400, "n 2"),
        ({"model": "nobody"}, 404, ""),
    ],
)
def test_errors_are_the_client_s(fleet: DynamoFleet, options: dict[str, Any], status: int, says: str) -> None:
    with pytest.raises(HTTPError) as error:
        ask(fleet, **options)
    assert error.value.code == status
    assert says in error.value.read().decode()


def test_a_client_that_hangs_up_ends_its_request(fleet: DynamoFleet, worker: Worker) -> None:
    before = worker.metric("dynamo_component_cancellation_total")
    connection = http.client.HTTPConnection(fleet.url.removeprefix("http://"))
    asked = {"model": MODEL, "prompt": "Tell a long story", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    fleet.wait_until(lambda: worker.metric("dynamo_component_cancellation_total") > before)
    fleet.wait_until(lambda: worker.metric("dynamo_component_inflight_requests") == 0)


def test_adapters_of_the_sources_are_models_of_the_fleet(fleet: DynamoFleet) -> None:
    fleet.wait_until(lambda: {"pirate", "emoji", "json"} <= set(fleet.models()))
    answers = {chat(fleet, model) for model in (MODEL, "pirate", "emoji")}
    assert len(answers) == 3


def test_a_name_moves_to_other_weights_while_it_answers(fleet: DynamoFleet, worker: Worker, folder: Path) -> None:
    place = folder / "mover"
    shutil.copytree(SAMPLE_ADAPTERS / "pirate", place)
    assert load_lora(worker, "moved", place)["status"] == "success"
    fleet.wait_until(lambda: "moved" in fleet.models())
    before = chat(fleet, "moved")
    assert before == chat(fleet, "pirate")
    for model in (MODEL, "moved"):
        cached_tokens(fleet, model)
        assert cached_tokens(fleet, model) >= 32
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(chat, fleet, "moved", max_tokens=100)
        fleet.wait_until(lambda: worker.metric("dynamo_component_inflight_requests") == 1)
        shutil.rmtree(place)
        shutil.copytree(SAMPLE_ADAPTERS / "emoji", place)
        load_lora(worker, "moved", place)
        assert not running.done(), "it waited for the request that runs"
        assert chat(fleet, "moved") == chat(fleet, "emoji") != before
        assert cached_tokens(fleet, MODEL) >= 32, "the prefixes of the others are still there"
        assert cached_tokens(fleet, "moved") == 0, "and those of the earlier weights are nobody's"
        assert cached_tokens(fleet, "moved") >= 32
        assert running.result().startswith(before), "the request that ran keeps the weights that it began with"
    call(f"{worker.system_url}/v1/loras/moved", method="DELETE")
    fleet.wait_until(lambda: "moved" not in fleet.models())
    with pytest.raises(HTTPError, match="404"):
        chat(fleet, "moved")


def test_prompts_that_begin_alike_find_what_was_computed(fleet: DynamoFleet, worker: Worker) -> None:
    first = ask(fleet, prompt="In another country. " + STORY + "One")
    again = ask(fleet, prompt="In another country. " + STORY + "Two")
    details = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, again)]
    assert details[0] == 0
    assert details[1] >= 32
    salted = ask(fleet, prompt="In another country. " + STORY + "Two", nvext={"cache_salt": "another"})
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_are_dynamo_s_and_ours(fleet: DynamoFleet, worker: Worker) -> None:
    ask(fleet)
    fleet.wait_until(lambda: worker.metric("multilora_requests_total") > 0)
    assert worker.metric("dynamo_component_requests_total") > 0
    assert worker.metric("dynamo_component_total_blocks") == worker.metric("multilora_kv_cache_blocks") > 0
    assert worker.metric("multilora_max_gpu_lora_adapters") == 32


def test_the_canary_finds_an_engine_that_answers_no_more(fleet: DynamoFleet, worker: Worker) -> None:
    (engine,) = psutil.Process(worker.process.pid).children()
    engine.suspend()
    try:
        fleet.wait_until(lambda: not is_healthy(worker.system_url), worker)
    finally:
        engine.resume()
    fleet.wait_until(lambda: is_healthy(worker.system_url), worker)
    assert text(ask(fleet))


def test_events_of_adapters_are_told_with_the_worker_s_number(worker: Worker) -> None:
    told = call(f"{worker.system_url}/engine/control/adapter_events", {"since": 0})
    assert int(told["instance_id"], 16) == worker.number
    assert {event["kind"] for event in told["events"]} >= {"uploaded", "loaded_to_device"}
    assert told["last"] >= len(told["events"]) > 0


def test_an_adapter_that_is_put_into_a_source_is_a_model_soon_after(
    fleet: DynamoFleet, worker: Worker, folder: Path
) -> None:
    shutil.copytree(SAMPLE_ADAPTERS / "emoji", folder / "late")
    fleet.wait_until(lambda: "late" in fleet.models())
    assert chat(fleet, "late") == chat(fleet, "emoji")
    listed = call(f"{worker.system_url}/engine/update/list_loras", {})["adapters"]
    (late,) = [one for one in listed if one["name"] == "late"]
    assert (late["status"], late["cache_location"]) == ("READY_FOR_USE", "DEVICE")
    shutil.rmtree(folder / "late")
    call(f"{worker.system_url}/v1/loras/late", method="DELETE")
    fleet.wait_until(lambda: "late" not in fleet.models())


def test_what_no_source_covers_is_not_loaded(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(HTTPError) as error:
        load_lora(worker, "outside", tmp_path)
    assert "none of the sources asked" in error.value.read().decode()
    assert "outside" not in call(f"{worker.system_url}/v1/loras")["loras"]


def test_an_engine_that_dies_is_started_again_and_clients_hear_of_nothing_else(
    fleet: DynamoFleet, worker: Worker
) -> None:
    plain, pirate = text(ask(fleet)), chat(fleet, "pirate")
    (engine,) = psutil.Process(worker.process.pid).children()
    engine.kill()
    engine.wait()

    def answers() -> bool:
        try:
            return text(ask(fleet)) == plain
        except HTTPError as error:
            if error.code != 503:
                raise
            return False

    fleet.wait_until(answers, worker)
    assert chat(fleet, "pirate") == pirate


def test_a_worker_that_is_told_to_end_finishes_what_it_has(fleet: DynamoFleet) -> None:
    """Last: it ends the worker of all tests."""
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 60, "stream": True, "ignore_eos": True, "temperature": 0}
    connection = http.client.HTTPConnection(fleet.url.removeprefix("http://"))
    connection.request("POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"})
    answer = connection.getresponse()
    first = answer.readline()
    worker = fleet.workers[0]
    (engine,) = psutil.Process(worker.process.pid).children()
    worker.process.terminate()
    events = [line for line in [first, *answer.read().splitlines()] if line.startswith(b"data: {")]
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    assert len("".join(choice["text"] for choice in choices)) > len(PROMPT)
    assert choices[-1]["finish_reason"] == "length"
    assert worker.process.wait(60) == 0, tail(worker.log)
    assert not engine.is_running()
