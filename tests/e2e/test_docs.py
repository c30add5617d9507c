"""The examples of the documents, run as printed but for the ports."""

import json
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest
from support.documents import PAGES, REPOSITORY, examples, run, run_bash

from multilora_client import Adapter, Client, load_adapter
from multilora_client.keys import parse_keys
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.tritonserver import ServerProcess
from servers.openai_front import started_openai_front

CODE = re.compile(r"^(.*)\n```(bash|python|json)$", re.MULTILINE)
TRIED_BY = re.compile(r"<!-- tried by: (\S+\.py) -->")
NOT_TRIED = re.compile(r"<!-- not tried: .+ -->")
OPENAI = "localhost:9000"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_example_is_run_here_or_names_its_trial(page: Path) -> None:
    for mark, language in CODE.findall(page.read_text()):
        if tried := TRIED_BY.fullmatch(mark):
            assert (REPOSITORY / tried[1]).exists(), mark
        else:
            assert re.fullmatch(r"<!-- example: \w+ -->", mark) or NOT_TRIED.fullmatch(mark), f"{language}: {mark}"


def test_every_example_has_a_test() -> None:
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in examples() if not re.search(rf"[\"']{name}[\"']", source)] == []


def example(name: str, server: ServerProcess) -> str:
    """The example of this name, at the ports of `server`."""
    printed = examples()[name]
    code = printed.replace("localhost:8000", server.http_url).replace("localhost:8001", server.grpc_url)
    assert code != printed, "the example names neither localhost:8000 nor localhost:8001"
    return code


def test_ones_own_adapter_answers_from_a_shell(server: ServerProcess, client: Client, pirate: Adapter) -> None:
    printed = run_bash(f"export MULTILORA_URL=grpc://{server.grpc_url}\n{examples()['own']}")
    question = [{"role": "user", "content": "Who are you?"}]
    assert printed.strip() == client.generate(messages=question, adapter=pirate, max_tokens=128).text.strip()


def test_ones_own_adapters_answer_by_their_names(server: ServerProcess) -> None:
    """With the tests' server in place of the example's, whose adapters come from the same kind of source."""
    serve, front, *curl = examples()["names"].splitlines()
    set_sources = shlex.split(serve)[shlex.split(serve).index("--set") + 1]
    (source,) = LoRAConfig.model_validate({"lora_sources": set_sources.removeprefix("lora_sources=")}).lora_sources
    assert (source.source, source.options) == ("directory", {"root": "/adapters"})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = front.split("#")[0].strip()
    assert command == "multilora openai &"
    command = f"multilora openai --url grpc://{server.grpc_url} --port {port} >&2 2>/dev/null &"
    script = "\n".join([command, *curl, "kill $!"]).replace(OPENAI, f"127.0.0.1:{port}")
    answer = json.loads(run_bash(script.replace('"max_tokens": 24', '"max_tokens": 24, "temperature": 0')))
    assert answer["model"] == "pirate"
    assert answer["choices"][0]["message"]["content"].startswith("Arr")


def test_our_own_clients_example_streams_an_answer(server: ServerProcess, client: Client, pirate: Adapter) -> None:
    question = [{"role": "user", "content": "Who are you?"}]
    assert (
        run([sys.executable, "-c", example("stream", server)])
        == client.generate(messages=question, adapter=pirate).text
    )


def test_the_sources_example_is_a_configuration() -> None:
    config = LoRAConfig.model_validate({"lora_sources": examples()["lora_sources"]})
    assert [spec.source for spec in config.lora_sources] == ["directory", "huggingface", "fsspec"]


def test_the_api_keys_example_is_a_file_of_keys() -> None:
    printed = examples()["api_keys"]
    entries = parse_keys(printed.encode(), Path("keys.json"))
    assert [entry.tenant for entry in entries] == ["acme", ""]
    assert len(entries) == len(json.loads(printed)["keys"])


def test_the_tritonclient_example_prints_an_answer(server: ServerProcess) -> None:
    run([sys.executable, "-c", example("tritonclient", server)])


def test_the_curl_example_prints_an_answer_and_no_error(server: ServerProcess) -> None:
    answer = run_bash(example("curl", server))
    assert "text_output" in answer
    assert '"error"' not in answer


def test_the_openai_example_prints_two_answers(server: ServerProcess) -> None:
    with started_openai_front(server.grpc_url, "--adapter=pirate=adapters/pirate") as address:
        run([sys.executable, "-c", examples()["openai"].replace(OPENAI, address)])


def test_the_training_example_asks_each_version_and_keeps_two(server: ServerProcess, client: Client) -> None:
    printed = run([sys.executable, "-c", example("training", server)])
    told = dict(re.findall(r"^(policy-\d) ([0-9a-f]{32}) ", printed, re.MULTILINE))
    kept = {info.name: info.digest for info in client.list_adapters() if info.name in told}
    for name in kept:
        client.unload_adapter(name)
    assert list(told) == [f"policy-{step}" for step in range(4)]
    assert kept == {name: told[name] for name in ("policy-2", "policy-3")}


def test_the_load_of_the_bench_example_is_answered(server: ServerProcess) -> None:
    rows = table(run_bash(example("bench", server)))
    assert rows["requests"] == ["8", "8"]
    assert rows["errors"] == ["0", "0"]
    assert rows["prompt tokens"] == [str(8 * 32)] * 2
    assert rows["answer tokens"] == [str(8 * 16)] * 2


@pytest.mark.parametrize("name", ["perf_analyzer_streams", "perf_analyzer_rate"])
def test_the_load_of_a_perf_analyzer_example_is_answered(server: ServerProcess, name: str) -> None:
    report = run_bash(example(name, server))
    counts = [int(count) for count in re.findall(r"Request count: (\d+)", report)]
    assert counts, report
    assert min(counts) >= 8


def test_the_size_example_tells_what_the_server_stores(server: ServerProcess, client: Client) -> None:
    adapter = load_adapter(REPOSITORY / "adapters" / "emoji", 102)
    client.upload(adapter)
    (stored,) = [info for info in client.list_adapters() if info.lora_task_id == 102]
    rows = table(run_bash(example("size", server).replace("size", "size --linears q,v")))
    assert int(rows["bytes_per_adapter"][0]) == stored.bytes
    assert int(rows["lora_cache_host_memory_bytes"][0]) == 2000 * stored.bytes


def table(text: str) -> dict[str, list[str]]:
    """The rows of a table by their first cells."""
    rows = ([cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line)
    return {name: cells for name, *cells in rows}
