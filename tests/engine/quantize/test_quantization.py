"""Whole checkpoints, read back by compressed-tensors and by transformers."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file
from support.loaded_weights import SHAPE, assert_read_as, small_llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.errors import ConfigError
from multilora_engine.models.loader import load_model
from multilora_engine.models.weights import Placement
from multilora_engine.quantize import SAMPLE_TEXT, OuterOptions, Report, Scheme, calibration, quantize_checkpoint
from multilora_engine.quantize.compensation import Activations, activations_of
from multilora_engine.quantize.measure import load_float_model, perplexity, replace_weights
from multilora_engine.quantize.scales import search_scales
from multilora_engine.quantize.text import token_windows

SCHEMES = [
    Scheme("w4a16", 16),
    Scheme("w4a16", 16, is_symmetric=False),
    Scheme("w4a16", -1, is_symmetric=False),
    Scheme("w8a16"),
    Scheme("w8a16", 16, is_symmetric=False),
    Scheme("fp8"),
]


def ignore_progress(*_: object) -> None:
    pass


def quantize(source: Path, output: Path, scheme: Scheme, **changes: Any) -> Report:
    options = {"calibration": None, "text": None, "outer": OuterOptions("none"), "on_progress": ignore_progress}
    return quantize_checkpoint(source, output, scheme, device=torch.device("cpu"), **options | changes)


def read_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(checkpoint.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def decompressed(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weight of each module that has scales, by compressed-tensors, as config.json says."""
    raw = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(
        {k: v for k, v in raw.items() if k not in ("version", "sparsity_config")}
    )
    schemes = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    tensors = read_tensors(checkpoint)
    weights = {}
    for scale in [name for name in tensors if name.endswith(".weight_scale")]:
        module = scale.removesuffix("_scale").removesuffix(".weight")
        state = {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}
        state["weight_scale"] = state["weight_scale"].float()
        scheme = schemes.get(module, schemes["Linear"])
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        weights[module] = compressor.decompress(state, scheme)["weight"]
    return weights


def shard(checkpoint: Path, path: Path) -> Path:
    LlamaForCausalLM.from_pretrained(checkpoint).save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.mark.parametrize("is_ragged", [False, True], ids=["whole words", "ragged"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
def test_compressed_tensors_reads_the_codes_times_the_scales_that_were_found(
    tmp_path: Path, scheme: Scheme, is_ragged: bool
) -> None:
    has_groups = scheme.group_size == 16
    hidden, intermediate = (64, 96) if not is_ragged else (80, 48) if has_groups else (44, 53)
    save_tiny_llama(tmp_path / "in", hidden_size=hidden, intermediate_size=intermediate, head_dim=16)

    report = quantize(tmp_path / "in", tmp_path / "out", scheme)

    source, written, read = (
        read_tensors(tmp_path / "in"),
        read_tensors(tmp_path / "out"),
        decompressed(tmp_path / "out"),
    )
    assert len(read) == report.num_modules == 14
    for module, weight in read.items():
        expected = source[f"{module}.weight"]
        num_groups = written[f"{module}.weight_scale"].shape[1]
        group_size = expected.shape[1] // num_groups
        scales, zeros = search_scales(expected, None, scheme.codes, group_size, scheme.is_symmetric, torch.bfloat16)
        assert torch.equal(written[f"{module}.weight_scale"], scales)
        scale, zero = scales.float()[..., None], 0 if zeros is None else zeros[..., None]
        groups = expected.view(len(expected), num_groups, group_size)
        assert torch.equal((scheme.codes.nearest(groups / scale + zero) - zero) * scale, weight.view_as(groups))


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
def test_transformers_computes_with_the_weights_that_perplexity_is_taken_of(
    checkpoint: Path, tmp_path: Path, text: Path, scheme: Scheme
) -> None:
    report = quantize(checkpoint, tmp_path / "out", scheme, text=text)

    plain = load_float_model(checkpoint, torch.device("cpu"))
    replace_weights(plain, decompressed(tmp_path / "out").items())
    windows = token_windows(checkpoint, text)
    with torch.inference_mode():
        # Of fp8 transformers rounds the activations, too; packed zero points it refuses.
        if scheme.name != "fp8" and scheme.is_symmetric:
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
            assert torch.equal(loaded(windows[0]).logits, plain(windows[0]).logits)
    assert report.perplexity_after == perplexity(plain, windows, ignore_progress)
    assert report.perplexity_after != report.perplexity_before


@pytest.mark.parametrize("scheme", [Scheme("w4a16", 16, False), Scheme("w8a16", 16, False)], ids=Scheme.describe)
def test_zero_points_lie_as_compressed_tensors_itself_packs_a_model_and_transformers_does_not_load_them(
    checkpoint: Path, tmp_path: Path, scheme: Scheme
) -> None:
    quantize(checkpoint, tmp_path / "out", scheme)

    model = LlamaForCausalLM.from_pretrained(checkpoint)
    raw = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw | {"quantization_status": "initialized"})
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_zero_point"):
            scales, zeros = search_scales(module.weight.data, None, scheme.codes, 16, False, torch.bfloat16)
            module.weight_scale.data, module.weight_zero_point.data = scales, zeros.to(torch.int8)
    ModelCompressor(config).compress_model(model)
    expected, written = model.state_dict(), read_tensors(tmp_path / "out")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    # `--help` says so.
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("scheme", [Scheme("w4a16"), Scheme("fp8")], ids=Scheme.describe)
def test_all_other_tensors_and_files_stay_as_they_are(checkpoint: Path, tmp_path: Path, scheme: Scheme) -> None:
    report = quantize(shard(checkpoint, tmp_path / "in"), tmp_path / "out", scheme)

    source, written = read_tensors(tmp_path / "in"), read_tensors(tmp_path / "out")
    rounded = {f"{module}.weight" for module in decompressed(tmp_path / "out")}
    for name in source.keys() - rounded:
        assert torch.equal(source[name], written[name])
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == written.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    assert all(name in load_file(tmp_path / "out" / file) for name, file in index["weight_map"].items())
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("in", "out"))
    assert after.pop("quantization_config")["format"] == scheme.format.value
    assert after == before
    assert report.bytes_after < report.bytes_before
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "out").glob("*.safetensors")} == {0o644}


def test_the_tokenizer_comes_along_and_pickles_do_not(checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for file in checkpoint.iterdir():
        (source / file.name).symlink_to(file)
    (source / "pytorch_model.bin").write_bytes(b"")
    (source / "chat_template.jinja").write_text("{{ messages }}")

    quantize(source, tmp_path / "out", Scheme("w8a16"))

    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}
    assert "pytorch_model.bin" not in names
    assert not (tmp_path / "out/config.json").is_symlink()
    assert "quantization_config" not in (checkpoint / "config.json").read_text()


OUTER = [
    OuterOptions("none"),
    OuterOptions("same"),
    OuterOptions("w8a16"),
    OuterOptions("same", has_coded_embeddings=True),
    OuterOptions("w8a16", has_coded_embeddings=True),
]


@pytest.mark.parametrize("outer", OUTER, ids=str)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_transformers_and_the_engine_read_each_kind_of_head_and_embeddings(
    tmp_path: Path, outer: OuterOptions, is_tied: bool
) -> None:
    shape = {"vocab_size": SHAPE["vocab_size"], "hidden_size": 64, "intermediate_size": 96}
    save_tiny_llama(tmp_path / "in", **shape, tie_word_embeddings=is_tied)

    quantize(tmp_path / "in", tmp_path / "out", Scheme("w4a16", 16), outer=outer)

    rounded = decompressed(tmp_path / "out")
    assert ("lm_head" in rounded) == (outer.head != "none")
    assert ("model.embed_tokens" in rounded) == outer.has_coded_embeddings
    float_model = load_float_model(tmp_path / "in", torch.device("cpu"))
    plain = {name: module.weight.clone() for name, module in float_model.named_modules() if name in rounded}
    scales = {name: 15 if outer.head == "same" and name == "lm_head" else 255 for name in plain}
    for name in {"lm_head", "model.embed_tokens"} & rounded.keys():
        step = plain[name].abs().amax(1, keepdim=True) * 2 / scales[name]
        assert ((rounded[name] - plain[name]).abs() <= 1.02 * step).all()
    replace_weights(float_model, rounded.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    token_ids = torch.arange(shape["vocab_size"])
    with torch.inference_mode():
        logits = float_model(token_ids[None]).logits[0]
        assert torch.equal(loaded(token_ids[None]).logits[0], logits)
    assert_read_as(tmp_path / "out", float_model)


def test_codes_of_tied_embeddings_under_a_head_of_floats_are_refused(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "in", hidden_size=64, intermediate_size=96, tie_word_embeddings=True)

    with pytest.raises(ConfigError, match="its head is its embeddings; leave --head none or --embeddings w8a16 out"):
        quantize(tmp_path / "in", tmp_path / "out", Scheme("w4a16"), outer=OuterOptions("none", True))


@pytest.mark.parametrize("head", ["w8a16", "none"])
def test_a_head_beside_the_embeddings_it_is_tied_to_has_to_be_equal(tmp_path: Path, head: str) -> None:
    save_tiny_llama(tmp_path / "in", hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    file = tmp_path / "in/model.safetensors"
    tensors = load_file(file)
    embeddings = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embeddings.clone()}, file)
    quantize(tmp_path / "in", tmp_path / "same", Scheme("w8a16"), outer=OuterOptions(head))

    save_file(tensors | {"lm_head.weight": embeddings * 1.01}, file)
    message = (
        "lm_head.weight differs from model.embed_tokens.weight although config.json says tie_word_embeddings; write"
    )
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path / "in", Placement(torch.float32, torch.float32, torch.device("cpu")))
    with pytest.raises(ConfigError, match=f'{message} "tie_word_embeddings": false in config.json to use it'):
        quantize(tmp_path / "in", tmp_path / "out", Scheme("w8a16"), outer=OuterOptions(head))
    assert not (tmp_path / "out").exists()


def test_scales_below_the_normal_numbers_of_float16_are_read_by_all(tmp_path: Path) -> None:
    model = small_llama(initializer_range=5e-4).half()
    model.save_pretrained(tmp_path / "in")

    quantize(tmp_path / "in", tmp_path / "out", Scheme("w8a16"))

    scales = [t for name, t in read_tensors(tmp_path / "out").items() if name.endswith("weight_scale")]
    assert all((scale != 0).all() and (scale.abs() < torch.finfo(torch.float16).tiny).all() for scale in scales)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    replace_weights(model.float(), decompressed(tmp_path / "out").items())
    token_ids = torch.arange(SHAPE["vocab_size"])[None]
    with torch.inference_mode():
        assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)
    assert_read_as(tmp_path / "out", model)


@pytest.mark.parametrize(("dtype", "scale_dtype"), [("bfloat16", "bfloat16"), ("float16", "float16")])
def test_scales_are_of_a_type_in_which_servers_compute(
    checkpoint: Path, tmp_path: Path, dtype: str, scale_dtype: str
) -> None:
    LlamaForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).save_pretrained(tmp_path / "in")

    quantize(tmp_path / "in", tmp_path / "out", Scheme("w4a16"))

    found = {t.dtype for name, t in read_tensors(tmp_path / "out").items() if name.endswith("weight_scale")}
    assert found == {getattr(torch, scale_dtype)}


def test_the_default_group_size_is_the_largest_that_divides_all_inputs(checkpoint: Path, tmp_path: Path) -> None:
    assert quantize(checkpoint, tmp_path / "a", Scheme("w4a16")).scheme == "w4a16, groups of 32"
    save_tiny_llama(tmp_path / "b", hidden_size=128, intermediate_size=256)
    assert quantize(tmp_path / "b", tmp_path / "c", Scheme("w4a16")).scheme == "w4a16, groups of 128"
    save_tiny_llama(tmp_path / "d", hidden_size=44, intermediate_size=52, head_dim=10)
    assert quantize(tmp_path / "d", tmp_path / "e", Scheme("w4a16")).scheme == "w4a16, a scale an output"
    assert len(decompressed(tmp_path / "e")) == 14


@pytest.mark.parametrize("scheme", [Scheme("w4a16"), Scheme("fp8")], ids=Scheme.describe)
def test_calibration_makes_each_linears_outputs_change_less(
    checkpoint: Path, tmp_path: Path, text: Path, scheme: Scheme
) -> None:
    plain = quantize(checkpoint, tmp_path / "plain", scheme)
    calibrated = quantize(checkpoint, tmp_path / "calibrated", scheme, calibration=text)

    source, weights = (
        read_tensors(checkpoint),
        {name: decompressed(tmp_path / name) for name in ("plain", "calibrated")},
    )
    inputs = inputs_of_linears(checkpoint, weights["calibrated"], token_windows(checkpoint, text))
    for module, x in inputs.items():
        errors = {
            name: ((read[module] - source[f"{module}.weight"]).double() @ x.t()).square().sum()
            for name, read in weights.items()
        }
        assert errors["calibrated"] < 0.9 * errors["plain"]
    assert (plain.num_calibration_tokens, calibrated.num_calibration_tokens) == (0, 744)


def test_each_linear_is_rounded_for_what_the_rounded_ones_before_give_it(
    checkpoint: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.Tensor] = []

    def record(moments: torch.Tensor) -> Activations:
        found.append(moments)
        return activations_of(moments)

    monkeypatch.setattr(calibration, "activations_of", record)
    quantize(checkpoint, tmp_path / "out", Scheme("w4a16"), calibration=text, outer=OuterOptions("w8a16"))

    inputs = inputs_of_linears(checkpoint, decompressed(tmp_path / "out"), token_windows(checkpoint, text))
    # Q, K and V have the same inputs, and so have gate and up.
    expected = [
        x for name, x in inputs.items() if name.endswith(("q_proj", "o_proj", "gate_proj", "down_proj", "head"))
    ]
    assert len(found) == len(expected) == 9
    for moments, x in zip(found, expected, strict=True):
        torch.testing.assert_close(moments.double(), x.t() @ x / len(x), rtol=1e-4, atol=1e-5)


def inputs_of_linears(
    checkpoint: Path, weights: dict[str, torch.Tensor], windows: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The inputs of the linears of `weights`, in the order in which they compute; each float64 [tokens, inputs]."""
    model = load_float_model(checkpoint, torch.device("cpu"))
    replace_weights(model, weights.items())
    inputs: dict[str, list[torch.Tensor]] = {}
    for name in weights:

        def keep(_: torch.nn.Module, arguments: tuple[torch.Tensor], name: str = name) -> None:
            inputs.setdefault(name, []).append(arguments[0][0].double())

        model.get_submodule(name).register_forward_pre_hook(keep)
    with torch.inference_mode():
        for window in windows:
            model(window)
    return {name: torch.cat(of_windows) for name, of_windows in inputs.items()}


def test_what_is_not_finite_is_refused_by_name_where_a_text_calibrates(
    checkpoint: Path, tmp_path: Path, text: Path
) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    up = model.model.layers[0].mlp.up_proj
    for value, message in ((torch.nan, "the weight of .*0.mlp.up_proj has"), (1e38, "0.mlp.down_proj has inputs")):
        up.weight.data.fill_(value)
        model.save_pretrained(tmp_path / str(value))
        shutil.copyfile(checkpoint / "tokenizer.json", tmp_path / str(value) / "tokenizer.json")
        with pytest.raises(ConfigError, match=message):
            quantize(tmp_path / str(value), tmp_path / "out", Scheme("w4a16"), calibration=text)
    assert not (tmp_path / "out").exists()


def test_perplexity_is_the_exponential_of_transformers_loss(checkpoint: Path, text: Path) -> None:
    model = load_float_model(checkpoint, torch.device("cpu"))
    windows = token_windows(checkpoint, text)

    with torch.inference_mode():
        losses = [model(window, labels=window).loss.double() * (window.shape[1] - 1) for window in windows]
    expected = torch.exp(sum(losses) / sum(window.shape[1] - 1 for window in windows)).item()
    assert len(windows) == 2
    assert perplexity(model, windows, ignore_progress) == pytest.approx(expected, rel=1e-5)


def test_perplexity_that_no_float_holds_is_infinite(checkpoint: Path, text: Path) -> None:
    model = load_float_model(checkpoint, torch.device("cpu"))
    model.lm_head.weight.data *= 1e6

    assert perplexity(model, token_windows(checkpoint, text), ignore_progress) == torch.inf


def test_the_sample_text_is_of_some_pages() -> None:
    assert len(SAMPLE_TEXT.read_text().split()) > 1000


def test_progress_counts_up_to_all_there_is_of_each_stage(checkpoint: Path, tmp_path: Path, text: Path) -> None:
    steps: list[tuple[str, int, int]] = []

    quantize(
        checkpoint,
        tmp_path / "out",
        Scheme("w8a16"),
        calibration=text,
        text=text,
        on_progress=lambda *step: steps.append(step),
    )

    totals = {"perplexity before": 2, "calibrating": 14, "rounding": 14, "perplexity after": 2}
    assert steps == [(stage, done, total) for stage, total in totals.items() for done in range(1, total + 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("w2a16",), "the scheme is 'w2a16'; write one of w4a16, w8a16, fp8"),
        (("w4a16", 0), "the group size is 0; write how many inputs share a scale, or -1 for all"),
        (("w4a16", -2), "the group size is -2"),
        (("fp8", None, False), "fp8 has no zero points; leave --asymmetric out"),
        (("fp8", 128), "fp8 has one scale an output; leave --group-size 128 out"),
    ],
)
def test_a_scheme_that_does_not_exist_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheme(*arguments)


def test_a_group_size_that_does_not_divide_is_refused_with_those_that_do(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"down_proj has 96 inputs, which groups of 64 do not divide;.*: 32, -1"):
        quantize(checkpoint, tmp_path / "out", Scheme("w4a16", 64))
    assert not (tmp_path / "out").exists()


def test_a_quantised_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    quantize(checkpoint, tmp_path / "out", Scheme("w8a16"))

    with pytest.raises(ConfigError, match=r"quantised already \(compressed-tensors\); give the checkpoint in floats"):
        quantize(tmp_path / "out", tmp_path / "again", Scheme("w4a16"))


def test_an_output_with_content_is_refused_and_stays(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match="is not empty; give --output another name"):
        quantize(checkpoint, tmp_path, Scheme("w8a16"))
    with pytest.raises(ConfigError, match="is no directory"):
        quantize(checkpoint, tmp_path / "file", Scheme("w8a16"))
    assert (tmp_path / "file").read_text() == "mine"
    quantize(checkpoint, tmp_path / "empty", Scheme("w8a16"))
    assert (tmp_path / "empty/config.json").is_file()


def test_what_a_killed_run_left_beside_the_output_is_removed(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "models/.out.unfinished").mkdir(parents=True)
    (tmp_path / "models/.out.unfinished/model.safetensors").write_bytes(b"half")
    (tmp_path / "models/.out.lock").touch()

    quantize(checkpoint, tmp_path / "models" / "out", Scheme("w8a16"))

    assert [path.name for path in (tmp_path / "models").iterdir()] == ["out"]


@pytest.mark.parametrize("content", ["", "x", None], ids=["empty", "one token", "missing"])
def test_a_text_of_less_than_two_tokens_is_refused(checkpoint: Path, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_text(content)

    with pytest.raises(ConfigError, match=r"text\.txt"):
        quantize(checkpoint, tmp_path / "out", Scheme("w8a16"), text=tmp_path / "text.txt")


def test_a_tokenizer_with_tokens_beyond_the_vocabulary_is_refused(checkpoint: Path, tmp_path: Path, text: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "in")
    tokenizer = json.loads((tmp_path / "in/tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["z"] = 400
    (tmp_path / "in/tokenizer.json").write_text(json.dumps(tokenizer))

    with pytest.raises(
        ConfigError, match=r"makes token 400 of .*text\.txt, but vocab_size in config\.json is 311; give"
    ):
        quantize(tmp_path / "in", tmp_path / "out", Scheme("w8a16"), text=text)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("initializer_range", "wide", "'initializer_range' expected float, got str"),
        ("pad_token_id", 400, "Padding_idx must be within num_embeddings"),
        ("id2label", {"first": "yes"}, "invalid literal for int"),
    ],
)
def test_a_value_that_transformers_refuses_is_refused_with_its_complaint(
    checkpoint: Path, tmp_path: Path, field: str, value: object, message: str
) -> None:
    shutil.copytree(checkpoint, tmp_path / "in")
    config = json.loads((tmp_path / "in/config.json").read_text())
    (tmp_path / "in/config.json").write_text(json.dumps(config | {field: value}))

    with pytest.raises(ConfigError, match=rf"(?s)config\.json: transformers refuses .*: .*{message}"):
        quantize(tmp_path / "in", tmp_path / "out", Scheme("w8a16"))


def test_a_checkpoint_without_a_tokenizer_needs_none_to_be_rounded(tmp_path: Path, text: Path) -> None:
    save_tiny_llama(tmp_path / "in", hidden_size=64, intermediate_size=96)

    with pytest.raises(ConfigError, match="has no tokenizer to read"):
        quantize(tmp_path / "in", tmp_path / "out", Scheme("w8a16"), text=text)
    quantize(tmp_path / "in", tmp_path / "out", Scheme("w8a16"))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", lambda t: t.fill_(torch.nan), "up_proj.weight has values that are not"),
        ("model.layers.1.mlp.up_proj.weight", lambda _: None, "up_proj.weight is missing; config.json asks for"),
        ("model.layers.1.mlp.up_proj.weight", lambda t: t[1:].clone(), r"up_proj.weight is \[95, 64\]; config.json"),
        ("model.layers.1.mlp.up_proj.weight", lambda t: t.int(), "up_proj.weight is I32; F32, BF16, F16 are read"),
        ("model.embed_tokens.weight", lambda t: t[1:].clone(), r"embed_tokens.weight is \[310, 64\]; config.json"),
        ("model.layers.1.mlp.gate.weight", lambda _: torch.ones(4, 64), "gate.weight is the weight of no linear"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, name: str, damage: Any, message: str
) -> None:
    source = shard(checkpoint, tmp_path / "in")
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    file = source / index.get(name, max(index.values()))
    tensors = load_file(file)
    changed = damage(tensors.pop(name, None))
    save_file(tensors | ({} if changed is None else {name: changed}), file)

    with pytest.raises(ConfigError, match=message):
        quantize(source, tmp_path / "out", Scheme("w8a16"))

    assert Counter(path.name for path in tmp_path.iterdir()) == Counter(["in"])
