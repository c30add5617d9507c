"""Contents in the form that a template takes: templates in the shapes of published ones, rendered by transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from multilora_engine.errors import InvalidRequest
from multilora_engine.text.chat_contents import Message, fit_contents

TEXT = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"""

ADDED = """{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|im_end|>\\n'
}}{% endfor %}"""

PARTS = """{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] %}{% if part['type']
== 'text' %}{{ part['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"""

GUARD = """Task: check.{% for message in messages %}
{{ 'User' if message.role == 'user' else 'Agent' }}: {% for content in message['content'] | selectattr('type',
'equalto', 'text') %}{{ content.text | trim }}{% endfor %}{% endfor %}"""

FIRST_PART = """{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}"""

VISION = """{% if messages[0].role == 'system' %}{% set system = messages[0]['content'] | trim %}{%
set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}<system>{{ system }}</system>{%
for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content | trim }}{% else %}{%
for c in m.content %}{% if c.type == 'image' %}<image>{% elif c.type == 'text' %}{{ c.text | trim
}}{% endif %}{% endfor %}{% endif %}{% endfor %}"""

GEMMA = """{% if messages[0].role == 'system' %}{% if messages[0].content is string %}{% set prefix
= messages[0].content + '\\n' %}{% else %}{% set prefix = messages[0].content[0]['text'] + '\\n'
%}{% endif %}{% set rest = messages[1:] %}{% else %}{% set prefix = '' %}{% set rest = messages %}{%
endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{
raise_exception('roles must alternate') }}{% endif %}<turn>{{ m.role }}\\n{{ prefix if loop.first else '' }}{%
if m.content is string %}{{ m.content | trim }}{% else %}{% for item in m.content %}{% if item.type == 'text'
%}{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}{% endfor %}"""

MACRO = """{% macro write(content) %}{% for item in content %}{% if 'text' in item %}{{ item.text
}}{% endif %}{% endfor %}{% endmacro %}{% set ns = namespace(text='') %}{% for m in messages %}{%
set ns.text = write(m.content) %}{{ m.role }}={{ ns.text }};{% endfor %}"""

ONLY_STRINGS = """{% for m in messages %}{% set content = m.content if m.content is string else ''
%}{{ m.role }}={{ content }};{% endfor %}"""

SYSTEM_ADDED = """{% set system = namespace(text='') %}{% for m in messages %}{% if m.role == 'system'
%}{% set system.text = system.text + m.content %}{% endif %}{% endfor %}{{ system.text }}|{% for
m in messages if m.role != 'system' %}{{ m.role }}={% for part in m.content %}{{ part.text }}{% endfor
%};{% endfor %}"""

REASONING = """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1]
}}{% else %}{{ m.content }}{% endif %}{% endfor %}"""

TOOLS = """{% for m in messages %}{% if m.role == 'tool' %}<result>{{ m.content | tojson }}{% elif
m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments | tojson
}}{% endfor %}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"""

BESIDE_CALLS = """{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.content is string }}{% for c in
m.tool_calls or [] %}<call>{{ c.function.name }}{% endfor %}{% endfor %}"""

NO_TEXT_AFTER_PARTS = """{% for m in messages %}{% if m.role == 'user' %}[{% for c in m.content %}{{ c.text
}}{% endfor %}]{% else %}{{ m.content[0].text + '' }}{% endif %}{% endfor %}"""

ALTERNATING = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{
raise_exception('roles must alternate') }}{% endif %}{{ '[' + m.content.strip() + ']' }}{% endfor %}"""

TAKES_TEXT = {"text": TEXT, "added": ADDED, "strings": ONLY_STRINGS, "reasoning": REASONING, "tools": TOOLS}
TAKES_PARTS = {"parts": PARTS, "guard": GUARD, "first part": FIRST_PART, "macro": MACRO}
TAKES_BOTH = {"vision": VISION, "gemma": GEMMA}


def renderer(template: str) -> Callable[[Sequence[Message]], str]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)

    def render(messages: Sequence[Message]) -> str:
        try:
            return str(tokenizer.apply_chat_template(copy.deepcopy([*messages]), tokenize=False))
        except Exception as error:
            raise InvalidRequest(str(error)) from error

    return render


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def in_form(messages: Sequence[Message], forms: Sequence[str]) -> list[Message]:
    """The same chat with texts, with one part each, or with a part for each half of the text."""

    def content(text: str, form: str) -> Any:
        half = len(text) // 2
        return {"text": text, "part": parts(text), "halves": parts(text[:half], text[half:])}[form]

    return [{**m, "content": content(m["content"], form)} for m, form in zip(messages, forms, strict=True)]


CHAT = [
    {"role": "system", "content": "Bebrief"},
    {"role": "user", "content": "Isthissafe?"},
    {"role": "assistant", "content": "Itis"},
    {"role": "user", "content": "Why?"},
]
FORMS = st.lists(st.sampled_from(["text", "part", "halves"]), min_size=4, max_size=4)


class TestForms:
    @pytest.mark.parametrize("template", [*TAKES_TEXT.values()], ids=[*TAKES_TEXT])
    @settings(max_examples=20)
    @given(forms=FORMS, start=st.integers(0, 3))
    def test_a_template_of_texts_gets_texts(self, template: str, forms: list[str], start: int) -> None:
        render, chat = renderer(template), CHAT[start:]
        assert render(fit_contents(in_form(chat, forms[start:]), render)) == render(chat)

    @pytest.mark.parametrize("template", [*TAKES_PARTS.values()], ids=[*TAKES_PARTS])
    @settings(max_examples=20)
    @given(forms=FORMS, start=st.integers(0, 3))
    def test_a_template_of_parts_gets_parts(self, template: str, forms: list[str], start: int) -> None:
        render, chat = renderer(template), CHAT[start:]
        expected = render(in_form(chat, ["part"] * len(chat)))
        assert all(message["content"] in expected for message in chat)
        assert render(fit_contents(in_form(chat, forms[start:]), render)) == expected

    @pytest.mark.parametrize("template", [*TAKES_BOTH.values()], ids=[*TAKES_BOTH])
    @settings(max_examples=20)
    @given(forms=FORMS, start=st.sampled_from([0, 1]))
    def test_a_template_of_both_keeps_what_was_sent_but_where_it_takes_one(
        self, template: str, forms: list[str], start: int
    ) -> None:
        """Their system message is a text, or no more than one part."""
        render, chat = renderer(template), CHAT[start:]
        sent = in_form(chat, forms[start:])
        fitted = fit_contents(sent, render)
        assert render(fitted) == render(chat)
        assert fitted[1 - start :] == sent[1 - start :]

    @settings(max_examples=20)
    @given(forms=FORMS)
    def test_a_template_may_take_texts_of_one_role_and_parts_of_the_others(self, forms: list[str]) -> None:
        render = renderer(SYSTEM_ADDED)
        expected = render(in_form(CHAT, ["text", "part", "part", "part"]))
        assert expected == "Bebrief|user=Isthissafe?;assistant=Itis;user=Why?;"
        assert render(fit_contents(in_form(CHAT, forms), render)) == expected

    def test_a_template_may_take_the_first_part_alone_and_refuse_texts(self) -> None:
        render = renderer(NO_TEXT_AFTER_PARTS)
        sent = in_form(CHAT[1:], ["text", "halves", "halves"])
        assert render(fit_contents(sent, render)) == "[Isthissafe?]Itis[Why?]"

    @pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
    @pytest.mark.parametrize("template", [TEXT, PARTS, MACRO, ONLY_STRINGS])
    def test_messages_of_every_role_reach_the_prompt(self, template: str, role: str) -> None:
        render = renderer(template)
        for content in ("hello", parts("hello"), parts("hel", "lo")):
            assert "hello" in render(fit_contents([{"role": role, "content": content}], render))

    def test_what_is_sent_in_the_right_form_stays_as_it_is(self) -> None:
        part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
        messages = [{"role": "user", "content": [part], "name": "x"}, {"role": "assistant", "content": None}, CHAT[0]]
        assert fit_contents(
            messages, renderer("{% for m in messages %}{{ m.content[0].text or m.content }}{% endfor %}")
        )
        assert fit_contents(messages[:1], renderer(PARTS)) == messages[:1]

    @pytest.mark.parametrize("texts", [("</think>",), ("a</think>b",), ("",), (" ",), ("'", '"'), ("\\", "{% x %}")])
    def test_the_texts_themselves_do_not_matter(self, texts: tuple[str, ...]) -> None:
        for template in (TEXT, PARTS, REASONING):
            render = renderer(template)
            fitted = fit_contents([{"role": "user", "content": parts(*texts)}], render)
            whole = {"role": "user", "content": parts(*texts) if template == PARTS else "".join(texts)}
            assert render(fitted) == render([whole])

    def test_long_chats_are_rendered_no_more_often_than_short_ones(self) -> None:
        for template in (*TAKES_TEXT.values(), *TAKES_PARTS.values(), *TAKES_BOTH.values()):
            render, counts = renderer(template), []
            for length in (2, 60):
                calls = [0]

                def counting(messages: Sequence[Message], calls: list[int] = calls, render: Any = render) -> str:
                    calls[0] += 1
                    return str(render(messages))

                fit_contents((CHAT[1:3] * length)[:length], counting)
                counts += calls
            assert counts[0] == counts[1] <= 3

    def test_the_errors_of_a_template_are_its_own(self) -> None:
        for forms in (["text"] * 2, ["part"] * 2, ["halves", "text"]):
            messages = in_form([CHAT[1], CHAT[1]], forms)
            for template in (GEMMA, ALTERNATING):
                render = renderer(template)
                with pytest.raises(InvalidRequest, match="must alternate"):
                    render(fit_contents(messages, render))
        broken = [{"role": "user", "content": "x"}]
        assert fit_contents(broken, renderer("{{ messages[0].missing.more }}")) == broken


CALL = {"id": "1", "type": "function", "function": {"name": "sky", "arguments": {"city": "Kiel"}}}


class TestWhatIsLeftOut:
    @pytest.mark.parametrize(
        ("template", "message", "error"),
        [
            ("{{ messages[0].content }}", CHAT[3], r"message 1 \(role user\)"),
            ("x", CHAT[0], r"message 0 \(role system\)"),
            (
                TEXT,
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
                "type image_url",
            ),
            (
                PARTS,
                {"role": "user", "content": [*parts("a"), {"type": "image"}]},
                r"part 1 \(type image\) of message 1",
            ),
            (PARTS, {"role": "user", "content": ["a"]}, "part 0 of message 1"),
            (VISION, {"role": "user", "content": [*parts("a"), {"type": "audio", "audio": "x"}]}, "part 1"),
            (PARTS, {"role": "user", "content": {"text": "a"}}, "message 1"),
        ],
    )
    def test_contents_that_reach_the_prompt_in_no_form_are_refused(
        self, template: str, message: Message, error: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=f"chat template leaves out .*{error}"):
            fit_contents([CHAT[1], message] if template != "x" else [message], renderer(template))

    @pytest.mark.parametrize("template", [TEXT, ADDED, PARTS, GEMMA])
    def test_calls_without_a_place_are_refused(self, template: str) -> None:
        messages = [CHAT[1], {"role": "assistant", "content": "", "tool_calls": [CALL]}]
        with pytest.raises(
            InvalidRequest, match=r"no place for tools: it leaves out call 0 of message 1 \(role assist"
        ):
            fit_contents(messages, renderer(template))
        old = {"role": "assistant", "content": None, "function_call": {"name": "sky", "arguments": "{}"}}
        with pytest.raises(InvalidRequest, match=r"no place for tools: it leaves out the call of message 1"):
            fit_contents([CHAT[1], old], renderer("{% for m in messages %}{{ m.content }}{% endfor %}"))

    def test_results_without_a_place_are_refused(self) -> None:
        template = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
        with pytest.raises(InvalidRequest, match=r"no place for tools: it leaves out message 1 \(role tool\)"):
            fit_contents([CHAT[1], {"role": "tool", "content": "rain"}], renderer(template))

    def test_a_text_beside_calls_takes_the_form_that_the_template_knows(self) -> None:
        render = renderer(BESIDE_CALLS)
        for content in ("Let me see.", parts("Let me see."), parts("Let me ", "see."), parts("", "Let me see.")):
            messages = [CHAT[1], {"role": "assistant", "content": content, "tool_calls": [CALL]}]
            assert render(fit_contents(messages, render)).endswith("Let me see.<call>sky")
        nothing = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        assert fit_contents([nothing], render) == [nothing]

    def test_calls_and_results_that_have_one_pass(self) -> None:
        """The template leaves out the text beside a call, as published ones do."""
        messages = [
            CHAT[1],
            {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": {"sky": "rain", "wind": [1, "west"]}, "tool_call_id": "1"},
            {"role": "tool", "content": {"degrees": 5}, "tool_call_id": "1"},
        ]
        render = renderer(TOOLS)
        assert fit_contents(messages, render) == messages
        result = {"role": "tool", "content": parts("rain")}
        assert render(fit_contents([result], render)) == '<result>"rain"'
