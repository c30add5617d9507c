"""What an adapter's folder says about its use: what is read, what is nothing, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.adapters import TINY
from support.sources import NO_BASE, digest_of, key, save_adapter
from transformers import AutoTokenizer, GenerationConfig

from multilora_engine.errors import AdapterUnusable, InvalidRequest
from multilora_engine.lora.adapter_file import describe_file, encode_header, write_file_atomically
from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.layout import AdapterTraits
from multilora_engine.lora.sources.directory import DirectorySource
from multilora_engine.lora.sources.fetcher import AdapterFetcher, FetchedAdapter
from multilora_engine.text.tokenizer import Tokenizer
from multilora_wire.adapter_use import (
    NO_USE,
    AdapterUse,
    UseError,
    join_use_files,
    parse_use,
    read_use_files,
    split_use_files,
)

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
VOCAB_SIZE = 49152


def use_of(reader: UseReader, has_token_rows: bool = False, **files: Any) -> AdapterUse:
    """The use of a folder with these files: their names with `_` for `.`, objects for JSON."""
    texts = {
        f"{name.rpartition('_')[0]}.{name.rpartition('_')[2]}": text if isinstance(text, str) else json.dumps(text)
        for name, text in files.items()
    }
    return parse_use(reader.read(texts, has_token_rows))


def test_a_folder_as_trainers_save_it_says_nothing(default_model_dir: Path, reader: UseReader, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(default_model_dir).save_pretrained(tmp_path)
    GenerationConfig.from_pretrained(default_model_dir).save_pretrained(tmp_path)
    assert len(read_use_files(tmp_path)) >= 3
    assert reader.read_folder(tmp_path, tmp_path) == ""
    for path in tmp_path.iterdir():
        if path.name != "tokenizer_config.json":
            path.unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = (default_model_dir / "chat_template.jinja").read_text()
    old = config | {"chat_template": template, "eos_token": {"content": config["eos_token"], "lstrip": False}}
    old |= {"padding_side": "left", "add_eos_token": True, "legacy": False, "added_tokens_decoder": {}}
    assert use_of(reader, tokenizer_config_json=old) == NO_USE


def test_templates_end_tokens_and_defaults_are_read(reader: UseReader) -> None:
    generation = {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 50}
    use = use_of(
        reader,
        chat_template_jinja=TEMPLATE,
        tokenizer_config_json={"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "chat_template": "other"},
        generation_config_json=generation | {"transformers_version": "4.44.0", "max_length": 4096, "num_beams": 1},
        multilora_json={"system_prompt": "You are a pirate.", "max_tokens": 20},
    )
    assert use == AdapterUse(
        chat_templates={"default": TEMPLATE},
        named_tokens={"eos_token": "<|endoftext|>"},  # the template writes no bos_token
        end_token_ids=(2, 0),
        system_prompt="You are a pirate.",
        max_tokens=20,
        temperature=0.7,
        top_k=0,
        top_p=0.9,
    )
    assert parse_use(use.text) == use
    assert use.describe() == (
        *("chat template", "eos_token <|endoftext|>", "end tokens 2, 0", "system prompt", "max_tokens 20"),
        *("temperature 0.7", "top_k 0", "top_p 0.9"),
    )


def test_a_name_that_has_no_token_in_the_folder_has_none(reader: UseReader) -> None:
    none = {"eos_token": None, "bos_token": None, "sep_token": None}
    use = use_of(reader, chat_template_jinja=TEMPLATE + "{{ sep_token }}", tokenizer_config_json=none)
    assert use.named_tokens == {"eos_token": ""}  # the template writes no bos_token, and the base has no sep_token
    assert use.describe() == ("chat template", "no eos_token")


def test_a_template_for_tools_is_read_from_both_places(reader: UseReader, tmp_path: Path) -> None:
    both = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D"},
        {"name": "rag", "template": "R"},
    ]
    use = use_of(reader, tokenizer_config_json={"chat_template": both})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    (tmp_path / "chat_template.jinja").write_text("D")
    assert use.chat_templates == {"default": "D", "tool_use": "T"}
    assert reader.read_folder(tmp_path, tmp_path) == use.text


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"do_sample": False, "temperature": 0.5}, NO_USE),
        ({"temperature": None, "top_k": None}, NO_USE),
        ({"repetition_penalty": 1.0}, NO_USE),
        ({"repetition_penalty": 1.5}, AdapterUse(repetition_penalty=1.5)),
        ({"do_sample": True}, AdapterUse(top_k=0)),
        ({"temperature": 0.5}, AdapterUse(temperature=0.5, top_k=0)),
        ({"eos_token_id": 2}, NO_USE),  # the base's own
        ({"eos_token_id": 7}, AdapterUse(end_token_ids=(7,))),
    ],
)
def test_defaults_of_generation(reader: UseReader, generation: dict[str, Any], expected: AdapterUse) -> None:
    assert use_of(reader, generation_config_json=generation) == expected


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"generation_config_json": {"num_beams": 4}}, "generation_config.json: num_beams is 4"),
        ({"generation_config_json": {"watermark": "x"}}, "watermark is x"),
        ({"generation_config_json": {"top_p": 1.5}}, r"generation_config.json: .*\$.top_p"),
        ({"generation_config_json": {"eos_token_id": 50000}}, "eos_token_id has 50000, expected 0 .. 49151"),
        ({"generation_config_json": "[]"}, "generation_config.json"),
        ({"multilora_json": {"max_token": 3}}, "multilora.json: .*max_token"),
        ({"multilora_json": {"max_tokens": 0}}, "multilora.json"),
        ({"chat_template_jinja": "{% if %}"}, "chat template 'default' does not compile: TemplateSyntaxError"),
        ({"chat_template_jinja": "{{ x | nothing }}"}, "does not compile"),
        ({"chat_template_jinja": "a" * 300_000}, "300"),
        ({"tokenizer_config_json": {"chat_template": [{"name": "rag", "template": "R"}]}}, "none named default"),
        ({"tokenizer_config_json": {"chat_template": [1]}}, "no list of named texts"),
        ({"tokenizer_config_json": "{"}, "tokenizer_config.json"),
        ({"added_tokens_json": {"<new>": 49152}}, "'<new>' with the id 49152"),
        ({"added_tokens_json": {"<|im_end|>": 7}}, r"'<\|im_end\|>' with the id 7, .*where it is 2"),
        ({"tokenizer_json": {"added_tokens": [{"id": 49152, "content": "<new>"}]}}, "<new>"),
        ({"tokenizer_config_json": {"added_tokens_decoder": {"49152": {"content": "<new>"}}}}, "<new>"),
        ({"tokenizer_config_json": {"added_tokens_decoder": {"x": {}}}}, "added tokens cannot be read"),
    ],
)
def test_whatever_is_not_known_is_refused_by_its_name(reader: UseReader, files: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        use_of(reader, **files)


def test_constants_of_a_template_are_not_computed_when_it_is_read(reader: UseReader) -> None:
    assert use_of(reader, chat_template_jinja="{{ 9 ** 9 ** 9 ** 9 }}{{ 'a' * 10 ** 12 }}").chat_templates


def test_thousands_of_added_tokens_are_read_as_gemmas_folders_have_them(
    reader: UseReader, default_model_dir: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(default_model_dir)
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
    decoder = {str(i): {"content": tokenizer.token_name(i), **flags} for i in range(6400)}
    text = json.dumps({"added_tokens_decoder": decoder}, indent=2)
    assert 1 << 20 < len(text) < 4 << 20
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert reader.read_folder(tmp_path, tmp_path) == ""
    (tmp_path / "tokenizer_config.json").write_text(" " * (4 << 20) + text)
    with pytest.raises(InvalidRequest, match=r"tokenizer_config\.json has \d+ bytes, at most 4194304 are read"):
        reader.read_folder(tmp_path, tmp_path)


def test_a_token_that_only_pads_is_taken(reader: UseReader) -> None:
    config: dict[str, Any] = {"pad_token": "<pad>", "added_tokens_decoder": {"49152": {"content": "<pad>"}}}
    assert use_of(reader, tokenizer_config_json=config) == NO_USE
    with pytest.raises(InvalidRequest, match="<pad>"):
        use_of(reader, tokenizer_config_json=config, chat_template_jinja="<pad>")
    with pytest.raises(InvalidRequest, match="<pad>"):
        use_of(reader, tokenizer_config_json=config | {"eos_token": "<pad>"})


def test_trained_rows_give_spare_tokens_a_meaning(reader: UseReader, default_model_dir: Path) -> None:
    padded = UseReader(Tokenizer(default_model_dir), default_model_dir, VOCAB_SIZE + 64)
    assert use_of(padded, has_token_rows=True, added_tokens_json={"<new>": VOCAB_SIZE}) == NO_USE
    with pytest.raises(InvalidRequest, match="<new>"):
        use_of(padded, has_token_rows=True, added_tokens_json={"<new>": VOCAB_SIZE + 64})


def test_the_files_travel_as_one_object(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 5}]}))
    files = read_use_files(tmp_path)
    assert files == {"chat_template.jinja": TEMPLATE, "tokenizer.json": '{"added_tokens":[{"id":5}]}'}
    assert split_use_files(join_use_files(files)) == files
    for wrong in (b"[]", b'{"chat_template.jinja": 1}', b'{"other.json": "{}"}', b"\xff"):
        with pytest.raises(UseError):
            split_use_files(wrong)


def fetch(root: Path, name: str, reader: UseReader) -> FetchedAdapter:
    fetcher = AdapterFetcher({"dir": DirectorySource(str(root))}, TINY, NO_BASE, uses=reader)
    try:
        return fetcher.fetch(key(name)).result(timeout=60)
    finally:
        fetcher.close()


def test_a_sources_folder_has_its_use_in_the_digest_only_where_there_is_one(reader: UseReader, tmp_path: Path) -> None:
    for name in ("plain", "one", "other"):
        save_adapter(tmp_path / name, seed=1)
    (tmp_path / "one" / "chat_template.jinja").write_text("1")
    (tmp_path / "other" / "chat_template.jinja").write_text("2")
    plain, one, other = (fetch(tmp_path, name, reader).packed for name in ("plain", "one", "other"))
    assert plain.digest == digest_of(1)
    assert len({plain.digest, one.digest, other.digest}) == 3
    assert parse_use(one.traits.use).chat_templates == {"default": "1"}
    # A restart reads the same from the file of the disk tier.
    path = tmp_path / "7.safetensors"
    header = encode_header(7, one.digest, "one", one.rows, one.num_pages, TINY, one.traits)
    write_file_atomically(path, header, list(one.pages))
    assert describe_file(path, TINY).traits == one.traits


def test_a_folder_with_a_wrong_use_is_unusable(reader: UseReader, tmp_path: Path) -> None:
    save_adapter(tmp_path / "bad", seed=1)
    (tmp_path / "bad" / "multilora.json").write_text('{"temprature": 1}')
    with pytest.raises(AdapterUnusable, match=r"multilora.json.*temprature"):
        fetch(tmp_path, "bad", reader)
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "bad" / "multilora.json").unlink()
    (tmp_path / "bad" / "multilora.json").symlink_to("/etc/hostname")
    with pytest.raises(AdapterUnusable, match="link out of"):
        fetch(tmp_path, "bad", reader)


def test_a_use_that_no_server_wrote_is_no_trait() -> None:
    for text in ('{"top_p": 7}', '{"other": 1}', "x"):
        with pytest.raises(ValueError, match="use cannot be read"):
            AdapterTraits(use=text)
