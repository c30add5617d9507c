"""The clients of TensorRT-LLM's and vLLM's Triton backends and Triton's OpenAI front end, as their authors ship them.

Each row is a program in one use of it, which has to work here; `scripts/conformance --clients DIR` runs them.
DIR has the folders tensorrtllm_backend-v0.8.0, -v0.12.0, -v0.18.2 and -v0.19.0, checkouts of those tags, vllm_backend,
and TensorRT-LLM with examples/hf_lora_convert.py and triton_backend/tools/llmapi_client.py.
A row is run by the command `argv` (`env NAME=VALUE ...` for variables), in which these names stand for
values of a run:

    {python}   an interpreter that has tritonclient and transformers
    {folder}   DIR/<folder>
    {grpc} {http}   host:port of the server's protocols
    {model}    directory of the served checkpoint, with its tokenizer
    {adapters} directory of the sample adapters, PEFT's files
    {scratch}  directory that all rows of a run share, empty at first but for the files of client_inputs.py;
               a row may read files of the rows before it; the command runs in it

A row passes when the command ends with `status` (`WORKS`), or with any (`REFUSED`, `FAILS`), and its output matches
`shows`. `FAILS` is for programs that cannot work here; the note says why.
`NOT_RUN` is a row that is not run; its note says why.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from marked_tables import markdown_table
from multilora_engine.tritonserver.upstream_models import UpstreamModels


class Outcome(StrEnum):
    WORKS = "works"
    REFUSED = "refused"
    FAILS = "fails"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class ClientProgram:
    """program, version, mode: the program, and the use of it that is tried, in the words of docs/clients.md.

    folder: its folder in DIR. argv: the command. shows: a regular expression that its output has to match, which says
    that it did its task: many programs end with status 0 in any case. served: upstream's models that the server adds.
    status: its exit status when it works. note: a remark that a user needs, for the table.
    """

    program: str
    version: str
    mode: str
    folder: str
    argv: tuple[str, ...]
    shows: str
    served: UpstreamModels = UpstreamModels.DECOUPLED
    expected: Outcome = Outcome.WORKS
    note: str = ""
    status: int = 0

    @property
    def outcome(self) -> str:
        """The expected answer, in words."""
        return f"{self.expected}: {self.note}" if self.note else str(self.expected)

    def command(self, places: Mapping[str, str]) -> list[str]:
        """`argv` for a run. Raises KeyError for a name in braces that `places` has not."""
        return [re.sub(r"\{(\w+)\}", lambda found: places[found[1]], argument) for argument in self.argv]

    def passes(self, status: int, output: str) -> bool:
        """Whether a run with this end went as expected."""
        is_ended_well = status == self.status or self.expected is not Outcome.WORKS
        return is_ended_well and re.search(self.shows, output) is not None


def markdown(programs: Sequence[ClientProgram]) -> str:
    """The table of docs/clients.md: versions, modes and programs that go alike share a line."""
    versions = _grouped((row.program, row.mode, row.outcome, row.version) for row in programs)
    modes = _grouped((program, outcome, ", ".join(known), mode) for (program, mode, outcome), known in versions.items())
    names = _grouped((known, "; ".join(tried), outcome, f"`{name}`") for (name, outcome, known), tried in modes.items())
    lines = ((", ".join(alike), *rest) for rest, alike in names.items())
    return markdown_table(("program", "version", "modes", "here"), lines, numbers=())


def _grouped(rows: Iterable[tuple[str, str, str, str]]) -> dict[tuple[str, str, str], list[str]]:
    """The last entries of rows by their first ones, in the order of the rows."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for *key, last in rows:
        groups[key[0], key[1], key[2]].append(last)
    return groups


ADAPTER = "pirate"
CONVERTED = "converted"
"""The folder to which hf_lora_convert.py writes the adapter, in the scratch directory."""

_VERSIONS = ("v0.8.0", "v0.12.0", "v0.18.2")
_ANSWER = r"PASS!"
"""The output of the token client when the tokens are those of the file, which transformers or PEFT wrote."""


def _row(
    path: str,
    version: str,
    mode: str,
    arguments: str,
    shows: str,
    served: UpstreamModels,
    detail: str = "",
    **more: Any,
) -> ClientProgram:
    """arguments: as a shell would split them. detail: after the program's name. more: further fields."""
    return ClientProgram(
        program=f"{path.rpartition('/')[2]} {detail}".strip(),
        version=version,
        mode=mode,
        folder=f"tensorrtllm_backend-{version}",
        argv=("{python}", f"{{folder}}/{path}", *shlex.split(arguments)),
        shows=shows,
        served=served,
        **more,
    )


def _tokens(version: str, mode: str, arguments: str, shows: str, served: UpstreamModels, **more: Any) -> ClientProgram:
    path = "inflight_batcher_llm/client/inflight_batcher_llm_client.py"
    return _row(path, version, mode, f"--url {{grpc}} {arguments}", shows, served, **more)


def _checked(name: str) -> str:
    """Arguments that compare the answer with a file of client_inputs."""
    return f"--input-tokens-csv prompt.csv --output-tokens-csv {name}.csv --check-output --request-output-len 16"


_TEXT = "--tokenizer-dir {model} --text {prompt}"
_ENDLESS = "--input-tokens-csv prompt.csv --end-id 50000 --request-output-len 4000 --stop-after-ms 1000"


_FAILS_BEHIND_IT = {
    "note": "after the cancellation the program itself fails, because it expects an answer",
    "status": 1,
}


def _token_rows(version: str) -> list[ClientProgram]:
    unary, stream = UpstreamModels.UNARY, UpstreamModels.DECOUPLED
    rows = [
        _tokens(version, "whole, checked against transformers", _checked("base"), _ANSWER, unary),
        _tokens(version, "streamed, checked against transformers", f"{_checked('base')} -S", _ANSWER, stream),
        _tokens(
            version,
            "beams",
            f"{_TEXT} --beam-width 3 --return-log-probs",
            r"(?s)Output beam 0: .*Output beam 2: .*\[ ?-\d.*\[ ?-\d",
            unary,
        ),
        _tokens(
            version,
            "penalties, top_k, top_p, temperature, streamed",
            f"{_TEXT} -S --top-k 40 --top-p 0.9 --temperature 0.8 --repetition-penalty 1.1 --presence-penalty 0.1 "
            "--frequency-penalty 0.1",
            r"Output beam 0:  ?\w",
            stream,
        ),
        _tokens(
            version,
            "log-probs and logits",
            f"{_TEXT} --return-log-probs --return-context-logits --return-generation-logits",
            r"(?s)\[ ?-\d.*context_logits\.shape: \(1, 5, .*generation_logits\.shape: \((?:1, )+16, ",
            unary,
        ),
        _tokens(
            version,
            "without the prompt, only the outputs asked for",
            f"{_TEXT} --exclude-input-in-output --requested-outputs sequence_length output_ids",
            r"Output beam 0:  ?\w",
            unary,
        ),
        _tokens(
            version,
            "streamed, stopped by a stop request",
            f"{_ENDLESS} -S --request-id stop-{version}",
            r"(?s)Got cancellation response from server.*Output sequence: ",
            stream,
        ),
        _tokens(
            version,
            "streamed, cancelled",
            f"{_ENDLESS} -S --stop-via-request-cancel --request-id cut",
            r"Request is cancelled",
            stream,
        ),
        _tokens(
            version,
            "whole, cancelled",
            f"{_ENDLESS} --stop-via-request-cancel --request-id cut",
            r"Request is cancelled",
            unary,
            **({} if version == "v0.18.2" else _FAILS_BEHIND_IT),
        ),
    ]
    if version != "v0.8.0":
        task = 7000 + int(version.split(".")[1])
        rows += [
            _tokens(
                version,
                "an adapter with its weights, checked against PEFT",
                f"{_checked('pirate')} --lora-path {CONVERTED} --lora-task-id {task}",
                _ANSWER,
                unary,
            ),
            _tokens(version, "then by its id alone", f"{_checked('pirate')} --lora-task-id {task}", _ANSWER, unary),
            _tokens(
                version,
                "the same, streamed",
                f"{_checked('pirate')} -S --lora-path {CONVERTED} --lora-task-id {task}",
                _ANSWER,
                stream,
            ),
            _tokens(
                version,
                "an id that nobody has sent",
                f"{_checked('pirate')} --lora-task-id 404",
                r"LoRA task 404 not found in cache\. Please send LoRA weights with request",
                unary,
                expected=Outcome.REFUSED,
            ),
        ]
    if version == "v0.18.2":
        rows += [
            _tokens(
                version,
                "three sequences",
                f"{_TEXT} --num-return-sequences 3 --top-k 40",
                r"(?s)Output beam 0: .*Output beam 2:  ?\w",
                stream,
            ),
            _tokens(
                version,
                "KV cache statistics",
                f"{_TEXT} --return-kv-cache-reuse-stats",
                r"(?s)kv_cache_alloc_new_blocks: \d.*kv_cache_reused_blocks: \d.*kv_cache_alloc_total_blocks: \d",
                unary,
            ),
        ]
    return rows


def _texts(version: str, mode: str, arguments: str, shows: str) -> list[ClientProgram]:
    """Rows for both text models, which are asked by streams whether they stream or not."""
    path = "inflight_batcher_llm/client/end_to_end_grpc_client.py"
    arguments = f"--url {{grpc}} --prompt {{prompt}} --output-len 16 {arguments}"
    return [
        _row(path, version, mode, f"{arguments} --model-name {model}", shows, UpstreamModels.DECOUPLED, detail=model)
        for model in ("ensemble", "tensorrt_llm_bls")
    ]


def _text_rows(version: str) -> list[ClientProgram]:
    whole, streamed = _EXPECTED_TEXTS[version]
    rows = [
        *_texts(version, "whole", whole, r"The capital of France is Paris"),
        *_texts(version, "streamed", f"-S {streamed}", r"(?m)^ Paris"),
        *_texts(version, "beams", "--beam-width 2", r"The capital of France is "),
        *_texts(version, "stop words", "--stop-words . ,", r"(?m)The capital of France is Paris(?:'\])?$"),
        *_texts(version, "bad words", "--bad-words ' Paris'", r"\A(?!(?s:.*)is Paris)(?s:.*)The capital of France is"),
        *_texts(
            version,
            "biased words",
            "--embedding-bias-words ' Lyon' --embedding-bias-weights 20",
            r"The capital of France is Lyon",
        ),
        *_texts(
            version,
            "penalties, temperature, streamed",
            "-S --temperature 0.7 --repetition-penalty 1.2 --presence-penalty 0.2 --frequency-penalty 0.2",
            r"(?m)^ \w",
        ),
        *_texts(
            version,
            "logits",
            "--return-context-logits --return-generation-logits",
            r"(?s)context_logits\.shape: \(1, 5, \d+\).*generation_logits\.shape: \(1, 1, 16, \d+\)",
        ),
    ]
    if version != "v0.8.0":
        rows += _texts(version, "two prompts as one batch", "--batch-inputs --prompt {two_prompts}", r"1: .*\w")
    if version == "v0.18.2":
        rows += [
            *_texts(version, "three sequences", "--num-return-sequences 3", r"(?m)^0 \[2\]: "),
            *_texts(version, "log-probs", "--return-log-probs", r"output_log_probs\.shape: \(1, 1, 16\)"),
            *_texts(version, "KV cache statistics", "--return-kv-cache-reuse-stats", r"kv_cache_reused_blocks: \d"),
            *_texts(version, "without the prompt", "--exclude-input-in-output", r"(?m)^0:  Paris"),
        ]
    return rows


_EXPECTED_TEXTS = {
    "v0.8.0": ("", ""),
    "v0.12.0": (
        "--check-outputs --expected-outputs {whole_answers}",
        "--check-outputs --expected-outputs {answers}",
    ),
    "v0.18.2": (
        "--check-outputs --expected-outputs {answers}",
        "--check-outputs --expected-outputs {answers}",
    ),
}
"""For a whole answer and a streamed one: arguments that compare it with that of transformers, if the program can."""


def _benchmark_rows(version: str) -> list[ClientProgram]:
    path = "tools/inflight_batcher_llm/benchmark_core_model.py"
    dataset = "dataset --dataset dataset.json --tokenizer-dir {model}"
    common = "--max-input-len 200 --concurrency 4"
    rows = [
        _row(path, version, "gRPC", f"-i grpc -u {{grpc}} {common} {dataset}", r"(?s)Total Latency.*OP tokens", _UNARY),
        _row(path, version, "HTTP", f"-i http -u {{http}} {common} {dataset}", r"Total Latency", _UNARY),
        _row(
            path,
            version,
            "random token ids",
            f"-i grpc -u {{grpc}} {common} --num-requests 4 "
            "token-norm-dist --input-mean 20 --input-stdev 2 --output-mean 8 --output-stdev 1",
            r"INVALID_ARG",
            _UNARY,
            expected=Outcome.REFUSED,
            note="it draws ids up to 2^31, which are no tokens of any model",
        ),
    ]
    if version != "v0.8.0":
        arguments = f"-i grpc --decoupled -u {{grpc}} {common} {dataset}"
        rows.append(
            _row(path, version, "gRPC streams", arguments, r"(?s)Total Latency.*OP tokens", UpstreamModels.DECOUPLED)
        )
    return rows


def _test_rows(version: str) -> list[ClientProgram]:
    path = "tools/inflight_batcher_llm/end_to_end_test.py"
    arguments = "-i {0} -u {{{0}}} --max-input-len 200 --concurrency 4 --dataset dataset.json"
    flags = [("", "")]
    if version == "v0.18.2":
        flags += [(", tensorrt_llm_bls, too", " --test-bls"), (", log-probs", " --return-log-probs")]
    return [
        _row(path, version, f"{title}{more}", f"{arguments.format(protocol)}{flag}", **_TEST_OUTCOMES[version])
        for title, protocol in (("HTTP", "http"), ("gRPC", "grpc"))
        for more, flag in flags
    ]


_UNARY = UpstreamModels.UNARY

_OLD_TEST = {
    "shows": r"'NoneType' object has no attribute 'astype'",
    "served": _UNARY,
    "expected": Outcome.FAILS,
    "note": "it reads log-probs and logits that it has not asked for; TensorRT-LLM of its time made zeros up for them",
}
_TEST_OF_LOGITS = _row(
    "tools/inflight_batcher_llm/end_to_end_test.py",
    "v0.18.2",
    "logits",
    "",
    shows="",
    served=_UNARY,
    expected=Outcome.NOT_RUN,
    note="it compares shapes with the vocabulary of GPT-2, and calls CUDA",
)
_TEST_OUTCOMES: Mapping[str, Mapping[str, Any]] = {
    "v0.8.0": _OLD_TEST,
    "v0.12.0": _OLD_TEST,
    "v0.18.2": {"shows": r"(?s)Functionality test succeed.*Total Latency", "served": _UNARY},
}


def _llmapi_rows() -> list[ClientProgram]:
    unary, stream = UpstreamModels.LLMAPI, UpstreamModels.LLMAPI_DECOUPLED
    tools, version = "tools/inflight_batcher_llm", "v0.19.0"
    dataset = "{folder}/ci/L0_backend_trtllm/simple_data.json"
    tested = f"--max-input-len 500 --dataset {dataset} --test-llmapi --model-name tensorrt_llm"
    asked = "--output-config \"{'return_finish_reason': True, 'return_stop_reason': True}\""
    succeeds = r"(?s)Functionality test succeeded.*Total Latency"
    benchmarked = (
        "--max-input-len 200 --concurrency 4 --test-llmapi dataset --dataset dataset.json --tokenizer-dir {model}"
    )

    def client(mode: str, arguments: str, shows: str, served: UpstreamModels = unary) -> ClientProgram:
        return ClientProgram(
            program="llmapi_client.py",
            version="2026",
            mode=mode,
            folder="TensorRT-LLM",
            argv=(
                *("{python}", "{folder}/triton_backend/tools/llmapi_client.py", "--url", "{grpc}"),
                *shlex.split(arguments),
            ),
            shows=shows,
            served=served,
        )

    endless = "--text '1 2 3 4 5 6 7 8 9 10' --request-output-len 4000 --stop-after-ms 1000 --request-id"
    adapter = f"--lora-id 7 --lora-name {ADAPTER} --lora-path {{adapters}}/{ADAPTER}"
    return [
        client("whole", "--text {prompt}", r"Output text: The capital of France is Paris"),
        client("stopped", f"{endless} stopped", r"Request is cancelled", stream),
        client("cancelled", f"{endless} cut --stop-via-request-cancel", r"Request is cancelled", stream),
        client("by the stream call", "--text {prompt} -S", r"Output text: The capital of France is Paris", stream),
        client(
            "an adapter by id, name and path",
            f"--text {{prompt}} {adapter}",
            r"Output text: The capital of France is \w",
        ),
        *(
            _row(f"{tools}/end_to_end_test.py", version, mode, arguments, succeeds, served, detail="--test-llmapi")
            for mode, arguments, served in (
                ("HTTP", f"-i http -u {{http}} {tested}", unary),
                ("gRPC", f"-i grpc -u {{grpc}} {tested}", unary),
                ("gRPC, reasons", f"-i grpc -u {{grpc}} {tested} {asked}", unary),
                ("gRPC streams", f"-i grpc -u {{grpc}} {tested} --streaming", stream),
            )
        ),
        *(
            _row(
                f"{tools}/benchmark_core_model.py", version, mode, arguments, r"Total Latency", served, "--test-llmapi"
            )
            for mode, arguments, served in (
                ("HTTP", f"-i http -u {{http}} {benchmarked}", unary),
                ("gRPC", f"-i grpc -u {{grpc}} {benchmarked}", unary),
                ("gRPC streams", f"-i grpc --decoupled -u {{grpc}} {benchmarked}", stream),
            )
        ),
    ]


def _vllm_rows() -> list[ClientProgram]:
    common = "-u {grpc} --input-prompts {folder}/samples/prompts.txt --results-file results.txt -v"
    return [
        ClientProgram(
            program="vllm_backend/samples/client.py",
            version="2026",
            mode=mode,
            folder="vllm_backend",
            argv=("{python}", "{folder}/samples/client.py", *shlex.split(f"{common} {arguments}")),
            shows=r"(?s)\A(?!.*(Encountered error|Caught an error)).*\w.*PASS: vLLM example",
            served=UpstreamModels.VLLM,
        )
        for mode, arguments in (
            ("whole", ""),
            ("streamed, without the prompt", "-s --exclude-inputs-in-outputs"),
            ("an adapter by its name", f"-l {ADAPTER}"),
            ("the same, streamed", f"-l {ADAPTER} -s --exclude-inputs-in-outputs"),
        )
    ]


_OPENAI_FRONT_END = ClientProgram(
    program="openai_frontend/main.py",
    version="2.73.0dev",
    mode="completions and chat, whole and streamed with usage; a required tool; adapters by --lora-separator",
    folder="server",
    argv=(),
    shows="",
    expected=Outcome.NOT_RUN,
    note="by hand it works, with exclude_input_in_output=true; no registry has the Python bindings that it imports",
)

_CONVERTER = ClientProgram(
    program="hf_lora_convert.py",
    version="05316d33",
    mode="an adapter's directory to the files that clients send",
    folder="TensorRT-LLM",
    argv=(
        *("env", "PYTHONPATH={folder}/stand_in", "{python}", "{folder}/examples/hf_lora_convert.py"),
        *("--in-file", f"{{adapters}}/{ADAPTER}", "--out-dir", CONVERTED, "--storage-type", "float16"),
    ),
    shows=r"Spent \S+ \(h:m:s\) to convert",
    note="with stand_in/tensorrt_llm of the user's for the helpers that it imports, since tensorrt_llm needs CUDA",
)

PROGRAMS: tuple[ClientProgram, ...] = (
    _CONVERTER,
    *(
        row
        for rows in (_token_rows, _text_rows, _benchmark_rows, _test_rows)
        for version in _VERSIONS
        for row in rows(version)
    ),
    _TEST_OF_LOGITS,
    *_llmapi_rows(),
    *_vllm_rows(),
    _OPENAI_FRONT_END,
)
