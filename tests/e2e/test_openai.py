"""The OpenAI front before the real server, asked with OpenAI's own package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest
import tokenizers
import torch
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent
from peft import PeftModel
from support.api_keys import write_keys
from support.openai_front import openai_front
from transformers import AutoModelForCausalLM

from multilora_client import ENSEMBLE, Adapter, Client, load_adapter
from multilora_client.keys import KeyRing
from multilora_client.openai.catalogue import Catalogue
from multilora_engine.tritonserver import ServerProcess

REPOSITORY = Path(__file__).parents[2]
QUESTION: Any = [{"role": "user", "content": "Who are you?"}]
LONG_TEXT = (
    "Honey bees live in large families. In summer there are tens of thousands of them in one hive, nearly all of them "
    "sisters. Some fetch nectar and pollen from the flowers around, others build combs of wax or feed the larvae. "
    "When a bee has found a meadow in bloom, she dances for the others, and her dance tells them how far it is. "
    "In winter they sit close together, eat what they have stored, and keep their queen warm."
)
ALL, PIRATES = "a key for all the models", "a key for pirates alone"
KEYS = ({"key": ALL, "adapters": ["*"], "base_model": True, "operate": True}, {"key": PIRATES, "adapters": ["pirate"]})


@pytest.fixture(scope="module")
def front_url(server: ServerProcess, pirate: Adapter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = KeyRing(write_keys(tmp_path_factory.mktemp("keys") / "keys.json", *KEYS))
    catalogue = Catalogue("base", {"pirate": pirate}, keys, allows_loading=True)
    with openai_front(catalogue, server.grpc_url) as url:
        yield url


@pytest.fixture
def user(front_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front_url, api_key=ALL, max_retries=0) as user:
        yield user


def test_stop_words_that_spell_special_tokens_end_answers(user: openai.OpenAI) -> None:
    """The model writes nothing but the special token."""
    options: Any = {"model": "base", "logit_bias": {"1": 100}, "temperature": 0}
    stop, length = ["<|im_start|><|im_start|>"], {"max_tokens": 8}
    whole = user.chat.completions.create(**options, **length, messages=QUESTION, stop=stop, n=2)
    assert [(choice.finish_reason, choice.message.content) for choice in whole.choices] == [("stop", "")] * 2
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 4
    *_, last = user.chat.completions.create(**options, **length, messages=QUESTION, stop=stop, stream=True)
    assert last.choices[0].finish_reason == "stop"
    (completed,) = user.completions.create(**options, **length, prompt="x", stop=stop, logprobs=1).choices
    assert (completed.finish_reason, completed.text) == ("stop", "")
    assert completed.logprobs is not None
    assert len(completed.logprobs.token_logprobs or []) == 2
    extra: Any = {"stop": stop, "logit_bias": {"1": 100}}
    response = user.responses.create(model="base", input="x", max_output_tokens=16, temperature=0, extra_body=extra)
    assert (response.status, response.output_text) == ("completed", "")
    assert response.usage is not None
    assert response.usage.output_tokens == 2


def test_contents_of_parts_are_texts_and_earlier_calls_are_told(user: openai.OpenAI, front_url: str) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Who are "}, {"type": "text", "text": "you?"}]}]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "sky", "arguments": "{}"}}
    calls: Any = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    calls += [{"role": "tool", "tool_call_id": "abcdefghi", "content": "dry"}]

    def prompt_of(messages: Any) -> tuple[int, str]:
        answer = user.chat.completions.create(model="base", messages=messages, max_tokens=4, temperature=0)
        assert answer.usage is not None
        headers = {"Authorization": f"Bearer {ALL}"}
        tokenized = httpx2.post(f"{front_url[:-3]}/tokenize", json={"messages": messages}, headers=headers).json()
        assert tokenized["count"] == answer.usage.prompt_tokens
        text = httpx2.post(f"{front_url[:-3]}/detokenize", json={"tokens": tokenized["tokens"]}, headers=headers).json()
        return answer.usage.prompt_tokens, str(text["prompt"])

    assert prompt_of(parts) == prompt_of(QUESTION)
    assert '<tool_call>\n{"name": "sky", "arguments": {}}' in prompt_of(calls)[1]


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

    pirates, stranger = user.with_options(api_key=PIRATES), user.with_options(api_key="none")
    assert [model.id for model in pirates.models.list()] == ["pirate"]
    ask(pirates, "pirate")
    with pytest.raises(openai.PermissionDeniedError):
        ask(pirates, "base")
    with pytest.raises(openai.AuthenticationError):
        ask(stranger, "pirate")
    with pytest.raises(openai.NotFoundError, match="no model 'parrot'"):
        ask(user, "parrot")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens") as too_long:
        ask(user, "pirate", extra_body={"messages": [{"role": "user", "content": "sea " * 9000}]})
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="logit_bias has the token 999999999"):
        ask(user, "pirate", logit_bias={"999999999": 1})


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


SKY: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
STOP: Any = {
    "type": "function",
    "function": {
        "name": "stop",
        "parameters": {
            "type": "object",
            "properties": {"when": {"$ref": "#/$defs/when"}},
            "required": ["when"],
            "additionalProperties": False,
            "$defs": {"when": {"enum": ["now", "later"]}},
        },
    },
}
RAIN: Any = [{"role": "user", "content": "What is the weather in Paris, in C?"}]


def arguments_fit(call: Any) -> bool:
    """Whether a call has what its function takes."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (SKY, STOP)}
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    return True


@pytest.mark.parametrize("model", ["base", "pirate"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_fits_its_function_streamed_and_not(user: openai.OpenAI, model: str, choice: Any) -> None:
    """The template of the default model has no place for tools: it gets them in the system message."""
    options: Any = {
        "model": model,
        "messages": RAIN,
        "tools": [STOP, SKY],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 60,
        "temperature": 0,
    }
    whole = user.chat.completions.create(**options).choices[0]
    with user.chat.completions.stream(**options) as stream:
        stream.until_done()
        streamed = stream.get_final_completion().choices[0]

    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert whole.message.tool_calls is not None
    assert streamed.message.tool_calls is not None
    (call,), (again,) = whole.message.tool_calls, streamed.message.tool_calls
    assert arguments_fit(call)
    assert call.model_dump()["function"].items() <= again.model_dump()["function"].items()
    if choice != "required":
        assert call.model_dump()["function"]["name"] == "get_weather"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_server_time"}}])
@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {"type": "object"}}])
def test_a_forced_function_without_parameters_gets_none(user: openai.OpenAI, choice: Any, parameters: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "get_server_time", **parameters}}
    answer = user.chat.completions.create(
        model="base", messages=RAIN, tools=[tool], tool_choice=choice, max_tokens=60, temperature=0
    )
    (call, *_) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_server_time", {})


def test_a_forced_call_that_is_cut_anywhere_is_no_text(user: openai.OpenAI) -> None:
    for max_tokens in (1, 2, 5, 8, 12, 20, 31, 35, 39):
        options: Any = {"model": "base", "messages": RAIN, "tools": [SKY], "tool_choice": "required"}
        options |= {"max_tokens": max_tokens, "temperature": 0}
        assert user.chat.completions.create(**options).choices[0].message.content is None
        pieces = user.chat.completions.create(**options, stream=True)
        assert all(piece.choices[0].delta.content is None for piece in pieces)


def test_control_characters_may_be_chosen(user: openai.OpenAI) -> None:
    choice = "a\x7f\x1f\u2028b"
    answer = user.chat.completions.create(model="base", messages=RAIN, extra_body={"guided_choice": [choice]})
    assert answer.choices[0].message.content == choice


def test_a_conversation_with_calls_goes_on(user: openai.OpenAI) -> None:
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages: Any = [
        *RAIN,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "18 degrees, sunny"},
    ]
    answer = user.chat.completions.create(model="base", messages=messages, tools=[SKY], max_tokens=24, temperature=0)
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


def test_calls_that_a_model_writes_by_itself_are_taken_out_of_its_text(user: openai.OpenAI) -> None:
    """The guide stands for a model that was trained to: this one is too small to call anything."""
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}\n</tool_call>'
    options: Any = {"model": "base", "messages": RAIN, "tools": [SKY], "temperature": 0}
    options |= {"extra_body": {"guided_choice": [text]}}
    whole = user.chat.completions.create(**options).choices[0]
    pieces = [piece.choices[0] for piece in user.chat.completions.create(**options, stream=True)]
    calls = [call for piece in pieces for call in piece.delta.tool_calls or []]

    assert whole.finish_reason == pieces[-1].finish_reason == "tool_calls"
    assert whole.message.content is None
    assert whole.message.tool_calls is not None
    assert whole.message.tool_calls[0].model_dump()["function"] == {
        "name": "get_weather",
        "arguments": '{"city": "Paris", "unit": "C"}',
    }
    assert calls[0].function.name == "get_weather"
    assert "".join(call.function.arguments or "" for call in calls) == '{"city": "Paris", "unit": "C"}'


def test_an_answer_follows_its_schema_or_is_a_call(user: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"]}
    answer = user.chat.completions.create(
        model="base",
        messages=RAIN,
        tools=[SKY],
        max_tokens=60,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": schema | {"additionalProperties": False}},
        },
    ).choices[0]
    if answer.message.tool_calls:
        assert all(map(arguments_fit, answer.message.tool_calls))
    else:
        jsonschema.validate(json.loads(answer.message.content or ""), schema)


def test_guides_of_vllm_are_followed(user: openai.OpenAI) -> None:
    def ask(**guide: Any) -> str | None:
        answer = user.chat.completions.create(
            model="base", messages=RAIN, max_tokens=20, temperature=0, extra_body=guide
        )
        return answer.choices[0].message.content

    assert ask(guided_choice=["sun", 'rain "or" snow']) in ("sun", 'rain "or" snow')
    assert re.fullmatch("[0-9]{2} C", ask(guided_regex="[0-9]{2} C") or "")
    assert ask(structured_outputs={"grammar": 'start: "a" "b"'}) == "ab"
    assert json.loads(ask(guided_json={"type": "object", "properties": {}, "additionalProperties": False}) or "") == {}


@pytest.fixture(scope="module")
def reference(default_model_dir: Path) -> PeftModel:
    """The default model by transformers, with the adapter by PEFT."""
    base = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    return PeftModel.from_pretrained(base, REPOSITORY / "adapters" / "pirate").eval()


def log_likelihoods(reference: PeftModel, model: str, token_ids: list[int]) -> list[float]:
    """Of each token but the first, given those before it."""
    with torch.no_grad(), nullcontext() if model == "pirate" else reference.disable_adapter():
        logits = reference(torch.tensor([token_ids])).logits[0, :-1]
    log_probs = logits.log_softmax(-1)
    return [float(log_probs[i, token_id]) for i, token_id in enumerate(token_ids[1:])]


@pytest.mark.parametrize("model", ["base", "pirate"])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_of_prompts_are_those_of_transformers(
    user: openai.OpenAI, reference: PeftModel, vocabulary: tokenizers.Tokenizer, model: str, max_tokens: int
) -> None:
    """As evaluations ask: prompts of token ids, with an echo, and places that are counted from their lengths."""
    texts = ["The sea is blue.", "Bees make honey, and café.", LONG_TEXT]
    prompts = [[0, *vocabulary.encode(text, add_special_tokens=False).ids] for text in texts]
    choices = user.completions.create(
        model=model, prompt=prompts, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0, seed=1
    ).choices

    assert [choice.index for choice in choices] == [0, 1, 2]
    for choice, prompt in zip(choices, prompts, strict=True):
        told = choice.logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert told.tokens is not None
        assert told.top_logprobs is not None
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(prompt) + max_tokens
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1 : len(prompt)] == pytest.approx(
            log_likelihoods(reference, model, prompt), abs=1e-3
        )
        for token, log_prob, top in list(zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True))[1:]:
            assert top[token] == log_prob
            assert max(top.values()) >= log_prob


def test_an_end_token_has_its_place_in_an_echo(
    user: openai.OpenAI, vocabulary: tokenizers.Tokenizer, client: Client
) -> None:
    """An answer of nothing but the end, which has no text, is a token all the same."""
    end = vocabulary.token_to_id("<|im_end|>")
    bias = {str(end): 100}
    told = user.completions.create(
        model="base", prompt="The sea", max_tokens=1, echo=True, logprobs=1, temperature=0, logit_bias=bias
    ).choices[0]

    assert (told.text, told.finish_reason) == ("The sea", "stop")
    assert told.logprobs is not None
    assert told.logprobs.tokens is not None
    assert len(told.logprobs.tokens) == len(client.tokenize("The sea")) + 1


def test_several_prompts_are_answered_as_each_by_itself(user: openai.OpenAI, client: Client) -> None:
    prompts = ["The sea is", "Bees make", "1 2 3"]
    alone = [client.generate(prompt, max_tokens=6).text for prompt in prompts]
    together = user.completions.create(model="base", prompt=prompts, max_tokens=6, temperature=0)
    echoed = user.completions.create(model="base", prompt=prompts, max_tokens=6, temperature=0, echo=True, stream=True)
    streamed = dict.fromkeys(range(3), "")
    for piece in echoed:
        streamed[piece.choices[0].index] += piece.choices[0].text

    assert [choice.text for choice in together.choices] == alone
    assert list(streamed.values()) == [prompt + text for prompt, text in zip(prompts, alone, strict=True)]
    assert together.usage is not None
    assert together.usage.completion_tokens == 18


def test_several_choices_are_streamed(user: openai.OpenAI) -> None:
    options: Any = {"model": "pirate", "messages": QUESTION, "max_tokens": 12, "n": 3, "seed": 7, "temperature": 1}
    whole = user.chat.completions.create(**options)
    texts = dict.fromkeys(range(3), "")
    reasons = {}
    *pieces, last = user.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    for piece in pieces:
        (choice,) = piece.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason

    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert len(set(texts.values())) > 1
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_responses_say_what_chats_say(user: openai.OpenAI) -> None:
    chat = user.chat.completions.create(model="pirate", messages=QUESTION, max_tokens=16, temperature=0)
    options: Any = {"model": "pirate", "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
    whole = user.responses.create(**options)
    *_, last = user.responses.create(**options, stream=True)

    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    assert whole.output_text == last.response.output_text == chat.choices[0].message.content
    assert last.response.status == whole.status
    assert chat.usage is not None
    assert whole.usage is not None
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    tool: Any = {"type": "function", **SKY["function"]}
    (call,) = user.responses.create(
        model="base", input=RAIN, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_output_tokens=60
    ).output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SKY["function"]["parameters"])


def test_what_is_cached_of_a_prompt_is_told(user: openai.OpenAI) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 10
    for _ in range(2):
        usage = user.completions.create(model="base", prompt=prompt, max_tokens=1, temperature=0).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert usage.prompt_tokens // 2 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_the_tokenizer_is_the_models(user: openai.OpenAI, vocabulary: tokenizers.Tokenizer) -> None:
    root = user.with_options(base_url=str(user.base_url).removesuffix("/v1/"))
    text = "Bees make honey 🐝"
    told: Any = root.post("/tokenize", body={"model": "pirate", "prompt": text}, cast_to=object)

    assert told["tokens"] == vocabulary.encode(text).ids
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 8192)
    back: Any = root.post("/detokenize", body={"model": "pirate", "tokens": told["tokens"]}, cast_to=object)
    assert back == {"prompt": text}
    (usage := user.chat.completions.create(model="base", messages=QUESTION, max_tokens=1).usage)
    chat: Any = root.post("/tokenize", body={"model": "base", "messages": QUESTION}, cast_to=object)
    assert usage is not None
    assert chat["count"] == usage.prompt_tokens


def test_an_adapter_of_the_servers_sources_becomes_a_model(user: openai.OpenAI, server: ServerProcess) -> None:
    def load(path: Path) -> None:
        user.post("/load_lora_adapter", body={"lora_name": "cheerful", "lora_path": str(path)}, cast_to=str)

    def ask(model: str) -> str | None:
        answer = user.chat.completions.create(model=model, messages=QUESTION, max_tokens=16, temperature=0)
        return answer.choices[0].message.content

    with pytest.raises(openai.BadRequestError):
        load(Path("/etc"))
    load(REPOSITORY / "adapters" / "emoji")
    with Client(f"grpc://{server.grpc_url}") as client:
        emoji = load_adapter(REPOSITORY / "adapters" / "emoji")
        expected = client.generate(messages=QUESTION, adapter=emoji, max_tokens=16).text
    assert ask("cheerful") == expected != ask("base")
    user.post("/unload_lora_adapter", body={"lora_name": "cheerful"}, cast_to=str)
    with pytest.raises(openai.NotFoundError):
        ask("cheerful")


def test_the_server_behind_is_seen_from_the_front(user: openai.OpenAI) -> None:
    root = str(user.base_url).removesuffix("/v1/")
    assert httpx2.get(f"{root}/health").status_code == 200
    assert httpx2.head(f"{root}/v1/models", headers={"Authorization": f"Bearer {ALL}"}).status_code == 200
    assert {model.model_dump()["max_model_len"] for model in user.models.list()} == {8192}
    metrics = httpx2.get(f"{root}/metrics", headers={"Authorization": f"Bearer {ALL}"}).text
    assert 'multilora_openai_requests_total{route="/health",status="200"}' in metrics
