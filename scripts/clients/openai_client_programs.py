"""Programs and libraries that speak OpenAI's protocol.

Each folder is a virtual environment with the package of its name, in the row's version, and the packages that it
demands only when it runs: litellm `mcp`, lm-eval its extra `api` and `transformers`. Programs that need a tokenizer get
the served checkpoint's; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clients.client_program import ClientProgram, Outcome, Served

_REFUSED = ("embeddings",)
"""The modes that are refused by a message that says so, which the mode checks."""


def _library(name: str, version: str, module: str, modes: Mapping[str, str]) -> tuple[ClientProgram, ...]:
    """Rows of a library. module: of openai_clients, with the modes of each row by the row's words."""
    python = ("env", "PYTHONPATH={clients}", "LITELLM_LOCAL_MODEL_COST_MAP=True", "{folder}/bin/python", "-m")
    return tuple(
        ClientProgram(
            program=name,
            version=version,
            mode=words,
            folder=name,
            argv=(*python, f"openai_clients.{module}", "http://{openai}/v1", *names.split()),
            shows=r"(?s)" + ".*".join(f"{mode}: as expected" for mode in names.split()),
            served=Served.OPENAI,
            expected=Outcome.REFUSED if words in _REFUSED else Outcome.WORKS,
        )
        for words, names in modes.items()
    )


OPENAI_SDK = _library(
    "openai",
    "3.54.0",
    "openai_sdk",
    {
        "chats: whole, streamed with usage, async, n, n streamed, log-probs": (
            "chat chat_stream chat_async choices choices_stream log_probs"
        ),
        "completions: several prompts, echo with log-probs": "prompts echo",
        "structured output: parse": "json_schema",
        "tools: required, named, auto, streamed, their results": (
            "tool_required tool_named tool_auto tool_stream tool_result"
        ),
        "responses: whole, streamed, structured, with a tool": (
            "responses responses_stream responses_schema responses_tool"
        ),
        "models": "models",
        "embeddings": "embeddings",
    },
)
LITELLM = _library(
    "litellm",
    "1.106.2",
    "litellm_package",
    {
        "completion, acompletion, streamed with usage, n": "chat chat_async chat_stream choices",
        "text_completion of several prompts, batch_completion": "prompts batch",
        "structured output": "json_schema",
        "tools: required, named, streamed": "tool_required tool_named tool_stream",
        "responses": "responses",
        "embeddings": "embeddings",
    },
)
LANGCHAIN = _library(
    "langchain-openai",
    "1.7.3",
    "langchain_package",
    {
        "ChatOpenAI: invoke, ainvoke, stream, batch, log-probs": "invoke ainvoke stream batch log_probs",
        "OpenAI: several prompts": "generate_prompts",
        "tools: any, named, streamed, their results": "tool_any tool_named tool_stream tool_result",
        "with_structured_output: json_schema, function_calling": "structured_by_schema structured_by_function",
        "use_responses_api: whole, streamed": "responses responses_stream",
    },
)
INSTRUCTOR = _library(
    "instructor",
    "1.17.0",
    "instructor_package",
    {
        "TOOLS, TOOLS_STRICT, partial": "tools tools_strict partial_stream",
        "JSON, JSON_SCHEMA": "json_mode json_schema",
        "RESPONSES_TOOLS": "responses_tools",
    },
)
LLAMA_INDEX = _library(
    "llama-index-llms-openai-like",
    "0.8.1",
    "llama_index_package",
    {
        "chat: whole, streamed, async; complete": "chat chat_stream chat_async complete",
        "tools, structured_predict by function and by schema": (
            "tool_required structured_by_function structured_by_schema"
        ),
    },
)
AGENTS = _library(
    "openai-agents",
    "0.24.0",
    "agents_package",
    {
        "an agent with a tool, over chat completions: whole, streamed": "chat_completions chat_completions_stream",
        "an agent with a tool, over responses: whole, streamed": "responses responses_stream",
    },
)


def _program(name: str, version: str, mode: str, argv: Sequence[str], shows: str, **more: str) -> ClientProgram:
    """A row of a program. argv: the arguments of `env`: variables, then the command."""
    served = Served(more.get("served", "openai"))
    return ClientProgram(name, version, mode, name, ("env", *argv), shows, served, note=more.get("note", ""))


def _lm_eval(mode: str, kind: str, tasks: str, *options: str, model: str = "base") -> ClientProgram:
    """A row of lm-eval. kind: of its models. tasks: of lm_eval_tasks/, whose data is found from this directory."""
    path = "chat/completions" if "chat" in kind else "completions"
    tokenizer = "" if "chat" in kind else ",tokenizer_backend=huggingface,tokenizer={model}"
    server = f"model={model},base_url=http://{{openai}}/v1/{path},num_concurrent=2,max_retries=1{tokenizer}"
    argv = ["--chdir={clients}", "HF_HOME={scratch}/hugging-face", "HF_HUB_OFFLINE=1", "{folder}/bin/lm_eval", "run"]
    argv += ["--model", kind, "--model_args", server, "--include_path", "lm_eval_tasks", "--tasks", tasks]
    argv += ["--batch_size", "4", *options]
    shows = r"(?s)" + "".join(rf".*\|{task} *\|" for task in tasks.split(","))
    return _program("lm-eval", "0.4.13", mode, argv, shows)


def _lm_eval_check(model: str, *options: str) -> ClientProgram:
    """A row that compares the log-likelihoods of the row before it with those of transformers."""
    whose = "the adapter's" if options else "the base model's"
    mode = f"{whose} log-likelihoods against transformers, within 1e-3"
    argv = ("{python}", "{clients}/check_lm_eval.py", f"{{scratch}}/lm-eval/{model}", "--model", "{model}", *options)
    return _program("lm-eval", "0.4.13", mode, argv, r"log-likelihoods are those of transformers")


_LIKELIHOODS = "multilora_choices,multilora_lines"
_ANSWERS = "multilora_answers"
_KEPT = ("--output_path", "{scratch}/lm-eval", "--log_samples")
"""The answers to each sample of lm-eval go to {scratch}/lm-eval/<model>."""
_COMPLETIONS = "local-completions"
LM_EVAL = (
    _lm_eval("local-chat-completions: generate_until", "local-chat-completions", _ANSWERS, "--apply_chat_template"),
    _lm_eval("local-completions: generate_until, prompts in batches", _COMPLETIONS, _ANSWERS),
    _lm_eval("local-completions: multiple choice, rolling log-likelihood", _COMPLETIONS, _LIKELIHOODS, *_KEPT),
    _lm_eval_check("base"),
    _lm_eval("local-completions: the same of an adapter", _COMPLETIONS, _LIKELIHOODS, *_KEPT, model="pirate"),
    _lm_eval_check("pirate", "--adapter", "{adapters}/pirate"),
)


def _guidellm(mode: str, path: str) -> ClientProgram:
    argv = ["{folder}/bin/guidellm", "run", "--disable-console-interactive"]
    argv += ["--backend", f"kind=openai_http,target=http://{{openai}},model=base,request_format={path}"]
    argv += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"]
    argv += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    argv += ["--tokenizer", "kind=hf_auto,model={model}", "--output", "kind=console"]
    return _program("guidellm", "0.8.1", mode, argv, r"completed .* successful=4 errored=0")


GUIDELLM = (
    _guidellm("chat completions", "/v1/chat/completions"),
    _guidellm("completions", "/v1/completions"),
    _guidellm("responses", "/v1/responses"),
)


def _aiperf(mode: str, kind: str, *options: str) -> ClientProgram:
    argv = ["{folder}/bin/aiperf", "profile", "--model", "base", "--url", "http://{openai}", "--endpoint-type", kind]
    argv += ["--tokenizer", "{model}", "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
    argv += ["--request-count", "4", "--concurrency", "2", "--ui", "simple", "--artifact-dir", "{scratch}/aiperf"]
    return _program(
        "aiperf",
        "0.13.0",
        mode,
        [*argv, *options],
        r"(?s)Error Rate \(%\) │ +0\.00 .*Request Count \(requests\) │ +4\.00",
    )


AIPERF = (
    _aiperf("chat completions", "chat"),
    _aiperf("chat completions, streamed", "chat", "--streaming"),
    _aiperf("completions, streamed", "completions", "--streaming"),
    _aiperf("responses, streamed", "responses", "--streaming"),
)


def _genai_perf(mode: str, *options: str, served: str = "openai") -> ClientProgram:
    """A row of genai-perf; scripts/perf_analyzer installs `perf_analyzer`, which sends the requests."""
    argv = ["PATH={folder}/bin:{scripts}:/usr/bin:/bin", "genai-perf", "profile", "--tokenizer", "{model}"]
    argv += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8", "--num-dataset-entries", "4"]
    argv += ["--request-count", "4", "--concurrency", "2", "--artifact-dir", "{scratch}/genai-perf", *options]
    return _program("genai-perf", "0.0.16", mode, argv, r"Request Count \(count\) [│|] +4\.00", served=served)


_OPENAI = ("-m", "base", "-u", "http://{openai}", "--endpoint-type")
GENAI_PERF = (
    _genai_perf("chat completions", *_OPENAI, "chat"),
    _genai_perf("chat completions, streamed", *_OPENAI, "chat", "--streaming"),
    _genai_perf("completions, streamed", *_OPENAI, "completions", "--streaming"),
)

OPENAI_PROGRAMS: tuple[ClientProgram, ...] = (
    *OPENAI_SDK,
    *LITELLM,
    *LANGCHAIN,
    *INSTRUCTOR,
    *LLAMA_INDEX,
    *AGENTS,
    *LM_EVAL,
    *GUIDELLM,
    *AIPERF,
    *GENAI_PERF,
)
