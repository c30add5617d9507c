"""The OpenAI front before the real server, asked with OpenAI's own package."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import openai
import pytest
import uvicorn

from multilora_client import ENSEMBLE, Adapter, AsyncClient, Client
from multilora_client.openai.app import make_app
from multilora_client.openai.catalogue import Catalogue
from multilora_engine.tritonserver import ServerProcess

QUESTION = [{"role": "user", "content": "Who are you?"}]
KEYS = {"all": frozenset({"*"}), "pirates": frozenset({"pirate"})}


@pytest.fixture(scope="module")
def front_url(server: ServerProcess, pirate: Adapter) -> Iterator[str]:
    app = make_app(Catalogue("base", {"pirate": pirate}, KEYS), lambda: AsyncClient(f"grpc://{server.grpc_url}"))
    front = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=front.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        front.should_exit = True
        thread.join()


@pytest.fixture
def user(front_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front_url, api_key="all", max_retries=0) as user:
        yield user


@pytest.mark.parametrize("model", ["base", "pirate"])
def test_chats_and_completions_are_what_the_server_answers(
    user: openai.OpenAI, client: Client, pirate: Adapter, model: str
) -> None:
    adapter = pirate if model == "pirate" else None
    expected = client.generate(messages=QUESTION, adapter=adapter, max_tokens=16)

    whole = user.chat.completions.create(model=model, messages=QUESTION, max_tokens=16, temperature=0)
    pieces = list(
        user.chat.completions.create(
            model=model,
            messages=QUESTION,
            max_completion_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.system_fingerprint == (expected.lora_digest or None)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == expected.num_input_tokens
    assert whole.usage.completion_tokens == expected.num_output_tokens
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces[:-1]) == expected.text
    assert pieces[-1].usage == whole.usage

    text = client.generate("The sea is", adapter=adapter, max_tokens=8).text
    completion = user.completions.create(model=model, prompt="The sea is", max_tokens=8, temperature=0)
    streamed = user.completions.create(model=model, prompt="The sea is", max_tokens=8, temperature=0, stream=True)
    assert completion.choices[0].text == text
    assert "".join(piece.choices[0].text for piece in streamed) == text


def test_an_adapter_that_the_server_forgot_still_answers(user: openai.OpenAI, client: Client, pirate: Adapter) -> None:
    def ask(model: str) -> str | None:
        answer = user.chat.completions.create(model=model, messages=QUESTION, max_tokens=16, temperature=0)
        return answer.choices[0].message.content

    before = ask("pirate")
    client.unload_adapter(pirate.lora_task_id)

    assert ask("pirate") == before != ask("base")


def test_a_schema_is_followed(user: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    answer = user.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "Is it sunny?"}],
        max_tokens=40,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": schema | {"additionalProperties": False}},
        },
    )
    assert isinstance(json.loads(answer.choices[0].message.content or "")["sunny"], bool)


def test_log_probs_are_the_servers_and_their_tokens_make_the_text(user: openai.OpenAI, client: Client) -> None:
    expected = client.generate("The sea is", max_tokens=8, num_top_log_probs=3)
    options = {"model": "base", "prompt": "The sea is", "max_tokens": 8, "temperature": 0, "logprobs": 3}
    whole = user.completions.create(**options).choices[0]
    pieces = [piece.choices[0] for piece in user.completions.create(**options, stream=True)]
    assert whole.logprobs is not None
    assert whole.logprobs.token_logprobs == pytest.approx(expected.log_probs, abs=1e-3)
    assert "".join(whole.logprobs.tokens) == whole.text == expected.text
    assert [max(top.values()) for top in whole.logprobs.top_logprobs] == whole.logprobs.token_logprobs
    streamed = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    assert [token for part in streamed for token in part.tokens] == whole.logprobs.tokens
    assert [offset for part in streamed for offset in part.text_offset] == whole.logprobs.text_offset

    chat = user.chat.completions.create(
        model="pirate", messages=QUESTION, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    told = b"".join(bytes(token.bytes or []) for token in chat.logprobs.content)
    assert told.decode() == chat.message.content
    assert {len(token.top_logprobs) for token in chat.logprobs.content} == {2}


def test_a_bias_forbids_a_token_and_penalties_change_the_answer(user: openai.OpenAI, client: Client) -> None:
    def ask(**options: object) -> str:
        answer = user.completions.create(
            model="base", prompt="1 2 3 1 2 3 1 2 3", max_tokens=8, temperature=0, **options
        )
        return answer.choices[0].text

    first = client.generate("1 2 3 1 2 3 1 2 3", max_tokens=8).token_ids[0]
    assert ask(logit_bias={str(first): -100}) != ask()
    assert ask(frequency_penalty=2, presence_penalty=2) != ask()


def test_the_answers_are_those_of_the_ensemble(user: openai.OpenAI, server: ServerProcess) -> None:
    """Which Triton's own OpenAI front end would ask."""
    with Client(f"grpc://{server.grpc_url}", door=ENSEMBLE) as ensemble:
        text = ensemble.generate("The sea is", max_tokens=8).text
        chat = ensemble.generate(messages=QUESTION, max_tokens=8).text
        drawn = ensemble.generate("The sea is", max_tokens=8, temperature=1.0, top_p=0.9, seed=5, stop_words=["."]).text
    options = {"model": "base", "max_tokens": 8}
    assert user.completions.create(**options, prompt="The sea is", temperature=0).choices[0].text == text
    answer = user.chat.completions.create(**options, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == chat
    again = user.completions.create(**options, prompt="The sea is", temperature=1, top_p=0.9, seed=5, stop=".")
    assert again.choices[0].text == drawn


def test_refusals_are_the_errors_of_the_package(user: openai.OpenAI) -> None:
    def ask(user: openai.OpenAI, model: str, **options: object) -> None:
        user.chat.completions.create(model=model, messages=QUESTION, max_tokens=4, **options)

    pirates, stranger = user.with_options(api_key="pirates"), user.with_options(api_key="none")
    assert [model.id for model in pirates.models.list()] == ["pirate"]
    ask(pirates, "pirate")
    with pytest.raises(openai.PermissionDeniedError):
        ask(pirates, "base")
    with pytest.raises(openai.AuthenticationError):
        ask(stranger, "pirate")
    with pytest.raises(openai.NotFoundError, match="no model 'parrot'"):
        ask(user, "parrot")
    with pytest.raises(openai.BadRequestError, match="n 2 is not supported with stream"):
        ask(user, "pirate", n=2, stream=True)
    with pytest.raises(openai.BadRequestError, match="embedding_bias has the token 999999999"):
        ask(user, "pirate", logit_bias={"999999999": 1})
    with pytest.raises(openai.BadRequestError, match="no place for tools"):
        ask(user, "pirate", tools=[{"type": "function", "function": {"name": "sky"}}])


def test_clients_that_hang_up_free_their_places(user: openai.OpenAI, client: Client) -> None:
    """The server runs 8 sequences at most; what nobody reads would keep it busy for minutes."""
    streams = [
        user.completions.create(model="pirate", prompt="1 2 3 4 5 6", max_tokens=4000, temperature=0, stream=True)
        for _ in range(8)
    ]
    for stream in streams:
        assert next(stream).choices[0].finish_reason is None
    for stream in streams:
        stream.close()

    assert client.generate("The sea is", max_tokens=2, timeout_s=60).text
