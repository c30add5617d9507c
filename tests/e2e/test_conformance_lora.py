"""The form in which TensorRT-LLM's clients send adapters, and the errors that they know."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from safetensors.torch import load_file
from support.conformance import NUM_TOKENS, PROMPT, row
from support.stock_clients import Tensors, stream, text_request, token_request, unary
from support.wire import GrpcClient, HttpClient, infer, text_of
from tritonclient.utils import InferenceServerException

from multilora_client import Adapter, AdapterTensors, Client
from multilora_client.convert import convert_peft
from multilora_engine.tritonserver import ServerProcess

PIRATE = Path(__file__).parents[2] / "adapters" / "pirate"
MODULES = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
SIZES = {1: (576, 576), 2: (576, 192), 3: (576, 192), 4: (576, 576), 5: (576, 1536), 6: (1536, 576), 7: (576, 1536)}
"""(in, out) of the default model's modules."""

fresh_ids = itertools.count(700_000)


def rows_of(directory: Path, scale: float | None = None) -> list[tuple[list[int], np.ndarray]]:
    """(module id, layer, rank) and A, B flat of each row of a PEFT adapter, written from upstream's description.

    scale: what B is multiplied by; None is alpha / rank.
    """
    config = json.loads((directory / "adapter_config.json").read_text())
    weights = load_file(directory / "adapter_model.safetensors")
    rows = []
    for name in sorted(name for name in weights if name.endswith("lora_A.weight")):
        parts = name.split(".")
        a = weights[name].float().numpy()
        b = weights[name.replace("lora_A", "lora_B")].float().numpy()
        b = b * (config["lora_alpha"] / len(a) if scale is None else scale)
        rows.append(([MODULES[parts[-3]], int(parts[parts.index("layers") + 1]), len(a)], np.append(a, b)))
    return rows


def triplet(rows: list[tuple[list[int], np.ndarray]], dtype: type = np.float16) -> Tensors:
    """The three tensors under a fresh id, rows filled up with zeros to the widest."""
    weights = np.zeros((1, len(rows), max(len(values) for _, values in rows)), dtype)
    for target, (_, values) in zip(weights[0], rows, strict=True):
        target[: len(values)] = values
    return {
        "lora_task_id": np.array([[next(fresh_ids)]], np.uint64),
        "lora_weights": weights,
        "lora_config": np.array([[config for config, _ in rows]], np.int32),
    }


@pytest.fixture(scope="module")
def pirate_rows() -> list[tuple[list[int], np.ndarray]]:
    return rows_of(PIRATE)


@pytest.fixture(scope="module")
def base(server: ServerProcess) -> str:
    return ask(server.grpc_url, {})


@pytest.fixture(scope="module")
def expected(server: ServerProcess, base: str) -> str:
    """What the pirate says, as our own converter sends it."""
    converted = convert_peft(PIRATE, "float32")
    tensors = {"lora_task_id": np.array([[next(fresh_ids)]], np.uint64), "lora_weights_fp32": converted.weights[None]}
    text = ask(server.grpc_url, tensors | {"lora_config": converted.config[None]})
    assert text != base
    return text


def ask(url: str, adapter: Tensors) -> str:
    """The text of a whole answer with an adapter."""
    [[text]] = answer(url, adapter).as_numpy("text_output").tolist()
    return str(text.decode())


def answer(url: str, adapter: Tensors) -> triton.InferResult:
    return unary(url, "generation_unary", text_as_tokens(adapter))


def text_as_tokens(adapter: Tensors) -> Tensors:
    request = text_request(PROMPT, NUM_TOKENS, False, **adapter)
    return {{"stream": "streaming"}.get(name, name): array for name, array in request.items()}


def digest_of(url: str, adapter: Tensors) -> bytes:
    [[digest]] = answer(url, adapter).as_numpy("lora_digest").tolist()
    return bytes(digest)


# The form of an adapter.


@row("LoRA tensors", "a row is A [rank, in] then B [out, rank], flat, filled up with zeros; the scale is in B")
def test_a_row_is_a_then_b(url: str, pirate_rows: list[tuple[list[int], np.ndarray]], base: str, expected: str) -> None:
    assert ask(url, triplet(pirate_rows)) == expected
    assert ask(url, triplet(rows_of(PIRATE, scale=1e-3))) == base, "the server scales by itself"


@row("LoRA tensors", "lora_config of 3 columns, and of 4 with is_dora")
def test_three_and_four_columns(url: str, pirate_rows: list[tuple[list[int], np.ndarray]], expected: str) -> None:
    four = [([*config, 0], values) for config, values in pirate_rows]
    assert ask(url, triplet(four)) == ask(url, triplet(pirate_rows)) == expected


@row("LoRA tensors", "rows in any order")
def test_rows_in_any_order(url: str, pirate_rows: list[tuple[list[int], np.ndarray]]) -> None:
    shuffled = [pirate_rows[i] for i in np.random.default_rng(0).permutation(len(pirate_rows))]
    assert digest_of(url, triplet(shuffled)) == digest_of(url, triplet(pirate_rows))


@row("LoRA tensors", "ranks that differ by row, modules that differ by layer")
def test_ranks_and_modules_differ(
    url: str, pirate_rows: list[tuple[list[int], np.ndarray]], base: str, expected: str
) -> None:
    wider = [widened(config, values) if config[1] % 2 else (config, values) for config, values in pirate_rows]
    assert ask(url, triplet(wider)) == expected
    some = [(config, values) for config, values in pirate_rows if config[1] % 3 or config[0] in (1, 5)]
    assert ask(url, triplet(some)) != base


def widened(config: list[int], values: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The same product A B with one more rank, of zeros."""
    module, layer, rank = config
    num_in, num_out = SIZES[module]
    a, b = values[: rank * num_in].reshape(rank, num_in), values[rank * num_in :].reshape(num_out, rank)
    return [module, layer, rank + 1], np.append(np.pad(a, ((0, 1), (0, 0))), np.pad(b, ((0, 0), (0, 1))))


@row("LoRA tensors", "DoRA rows: the normalised magnitude [out] after B")
def test_dora_rows(url: str, pirate_rows: list[tuple[list[int], np.ndarray]], expected: str) -> None:
    def with_magnitude(magnitude: float) -> Tensors:
        return triplet(
            [
                ([*config, 1], np.append(values, np.full(SIZES[config[0]][1], magnitude)))
                for config, values in pirate_rows
            ]
        )

    assert ask(url, with_magnitude(1.0)) == expected
    assert ask(url, with_magnitude(0.25)) != expected


@row("LoRA tensors", "FP16 in lora_weights, BF16 and FP32 in tensors of their own, whatever the model's type")
def test_three_types(url: str, pirate_rows: list[tuple[list[int], np.ndarray]], expected: str) -> None:
    with GrpcClient(url) as client:
        for name in ("lora_weights_bf16", "lora_weights_fp32"):
            tensors = triplet(pirate_rows, np.float32)
            tensors[name] = tensors.pop("lora_weights")
            assert text_of(infer(client, "generation_unary", text_as_tokens(tensors))) == expected
    assert ask(url, triplet(pirate_rows, np.float16)) == expected


@row("LoRA tensors", "the files of upstream's converter, model.lora_weights.npy and model.lora_config.npy, as they are")
def test_upstreams_files(url: str, tmp_path: Path, expected: str) -> None:
    convert_peft(PIRATE, "float16").save(tmp_path)
    files = {name: np.load(tmp_path / f"model.{name}.npy") for name in ("lora_weights", "lora_config")}
    assert [array.ndim for array in files.values()] == [3, 3]
    assert ask(url, {"lora_task_id": np.array([[next(fresh_ids)]], np.uint64), **files}) == expected


# The errors that clients know.


@pytest.fixture
def one_row() -> Tensors:
    """A small adapter: zeros of rank 2 on the queries of one layer."""
    return triplet([([1, 0, 2], np.zeros(2 * (576 + 576)))])


def refused(url: str, adapter: Tensors, status: str, message: str) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        answer(url, adapter)
    assert caught.value.status() == f"StatusCode.{status}"


@row("LoRA errors", "an id that is not cached: `LoRA task N not found in cache. Please send LoRA weights with request`")
def test_an_unknown_id(server: ServerProcess, url: str) -> None:
    adapter = {"lora_task_id": np.array([[next(fresh_ids)]], np.uint64)}
    text = f"LoRA task {adapter['lora_task_id'][0, 0]} not found in cache. Please send LoRA weights with request"
    refused(url, adapter, "NOT_FOUND", text)
    for model, request in (
        ("tensorrt_llm", token_request([5], 1, True)),
        ("tensorrt_llm_bls", text_request(PROMPT, 1, True)),
        ("ensemble", text_request(PROMPT, 1, True)),
    ):
        with pytest.raises(InferenceServerException, match=rf"\[NOT_FOUND\] {text}"):
            stream(url, model, request | adapter)
    with HttpClient(server.http_url) as client, pytest.raises(InferenceServerException, match=text) as caught:
        infer(client, "generation_unary", text_as_tokens(adapter))
    assert caught.value.status() == "404"


@pytest.fixture
def full_cache(client: Client) -> Iterator[None]:
    """The host tier, 256 MiB, holds three adapters of 78 MB, all of them in use."""
    config = np.array([[module, layer, 64] for layer in range(30) for module in SIZES], np.int32)
    large = AdapterTensors(np.zeros((len(config), 64 * (576 + 1536)), np.float16), config, "FP16")
    with ExitStack() as stack:
        for _ in range(3):
            adapter = Adapter(next(fresh_ids), large)
            client.upload(adapter)
            client.pin_adapter(adapter.lora_task_id)
            stack.callback(client.unload_adapter, adapter.lora_task_id)
        yield


@row("LoRA errors", "no room: `PEFT Cache is full. Could not store taskId=N`, `There are no done tasks to evict`")
@pytest.mark.usefixtures("full_cache")
def test_a_full_cache(url: str) -> None:
    ranks = [([module, layer, 32], np.zeros(32 * sum(SIZES[module]))) for layer in range(30) for module in SIZES]
    adapter = triplet(ranks)
    task = adapter["lora_task_id"][0, 0]
    message = rf"PEFT Cache is full\. Could not store taskId={task}: Cache is full\. There are no done tasks to evict"
    refused(url, adapter, "UNAVAILABLE", message)


@row("LoRA errors", "tensors without an id: `lora_task_id must be set for LoRA inference`")
def test_no_id(url: str, one_row: Tensors) -> None:
    del one_row["lora_task_id"]
    refused(url, one_row, "INVALID_ARGUMENT", "lora_task_id must be set for LoRA inference")


@row("LoRA errors", "one tensor of two: `Request for LoRA inference must have both lora_weights and lora_keys`")
@pytest.mark.parametrize("missing", ["lora_weights", "lora_config"])
def test_one_tensor(url: str, one_row: Tensors, missing: str) -> None:
    del one_row[missing]
    message = "Request for LoRA inference must have both lora_weights and lora_keys"
    refused(url, one_row, "INVALID_ARGUMENT", message)


@row("LoRA errors", "shapes: `Invalid shape for lora_weights tensor`, `Expected batch dimension to be 1`")
def test_shapes(url: str, one_row: Tensors) -> None:
    twice = {name: np.concatenate([array, array]) for name, array in one_row.items()}
    batch = text_as_tokens({})
    request = {name: np.concatenate([array, array]) for name, array in batch.items()} | twice
    message = "Invalid shape for lora_weights .*Expected batch dimension to be 1"
    with pytest.raises(InferenceServerException, match=message):
        unary(url, "generation_unary", request)
    five = np.zeros((1, 1, 5), np.int32)
    refused(url, {**one_row, "lora_config": five}, "INVALID_ARGUMENT", "Invalid shape for lora_config tensor")
    rows = np.repeat(one_row["lora_config"], 2, axis=1)
    refused(url, {**one_row, "lora_config": rows}, "INVALID_ARGUMENT", "each row needs both")


@row("LoRA errors", "lora_config of another type than INT32")
def test_the_type_of_the_config(url: str, one_row: Tensors) -> None:
    wrong = one_row["lora_config"].astype(np.int64)
    refused(url, {**one_row, "lora_config": wrong}, "INVALID_ARGUMENT", "lora_config.*INT64|INT64.*lora_config")


def config(module: int, layer: int, rank: int) -> np.ndarray:
    return np.array([[[module, layer, rank]]], np.int32)


@row("LoRA errors", "a layer that the model has not: `Expected layerId to be in the range [0, numModelLayers)`")
def test_a_layer_out_of_range(url: str, one_row: Tensors) -> None:
    message = r"Expected layerId to be in the range \[0, numModelLayers\)"
    refused(url, {**one_row, "lora_config": config(1, 30, 2)}, "INVALID_ARGUMENT", message)


@row("LoRA errors", "a rank that cannot be: `Expected adapterSize to be > 0`, `Invalid low_rank (N)`")
def test_impossible_ranks(url: str, one_row: Tensors) -> None:
    for rank, message in ((0, "Expected adapterSize to be > 0"), (65, r"Invalid low_rank \(65\)")):
        refused(url, {**one_row, "lora_config": config(1, 0, rank)}, "INVALID_ARGUMENT", message)


@row("LoRA errors", "a module that the model has not: `lora module N not enabled for this model`")
def test_a_module_that_is_not_there(url: str, one_row: Tensors) -> None:
    message = "lora module 13 not enabled for this model"
    refused(url, {**one_row, "lora_config": config(13, 0, 2)}, "INVALID_ARGUMENT", message)


@row("LoRA errors", "a row too narrow for its rank: `lora_weights has to few values for NAME`")
def test_a_narrow_row(url: str, one_row: Tensors) -> None:
    message = "lora_weights has to few values for attn_q"
    refused(url, {**one_row, "lora_config": config(1, 0, 3)}, "INVALID_ARGUMENT", message)


@row("LoRA errors", "what upstream lets through: NaN, a row given twice, values after the declared rank")
def test_what_upstream_does_not_check(url: str, one_row: Tensors) -> None:
    nan, after = one_row["lora_weights"].copy(), one_row["lora_weights"].copy()
    nan[0, 0, 7] = np.nan
    after[0, 0, -1] = 1
    refused(url, {**one_row, "lora_weights": nan}, "INVALID_ARGUMENT", "holds nan at position 7")
    refused(
        url,
        {**one_row, "lora_weights": after, "lora_config": config(1, 0, 1)},
        "INVALID_ARGUMENT",
        "declared rank or module is wrong",
    )
    twice = {name: np.repeat(one_row[name], 2, axis=1) for name in ("lora_weights", "lora_config")}
    refused(url, one_row | twice, "INVALID_ARGUMENT", "both adapt")


@row("LoRA errors", "other weights under a cached id, which upstream ignores")
def test_other_weights_under_a_cached_id(url: str, one_row: Tensors) -> None:
    first = digest_of(url, one_row)
    other = {**one_row, "lora_weights": one_row["lora_weights"] + 1}
    refused(url, other, "ALREADY_EXISTS", "cached with other weights")
    assert digest_of(url, {"lora_task_id": one_row["lora_task_id"]}) == first


@row("LoRA errors", "which adapter answered is told by lora_task_id_out and lora_digest, at every door")
def test_which_adapter_answered(url: str, one_row: Tensors) -> None:
    digest = digest_of(url, one_row)
    adapter = {"lora_task_id": one_row["lora_task_id"]}
    for model, request in (
        ("generation", token_request([5], 1, True)),
        ("tensorrt_llm", token_request([5], 1, True)),
        ("tensorrt_llm_bls", text_request(PROMPT, 1, True)),
        ("ensemble", text_request(PROMPT, 1, True)),
    ):
        for tensors, lora_task_id, expected in ((adapter, adapter["lora_task_id"][0, 0], digest), ({}, 0, b"")):
            result = stream(url, model, request | tensors)[-1]
            assert result.as_numpy("lora_task_id_out").tolist() == [[lora_task_id]]
            assert result.as_numpy("lora_digest").tolist() == [[expected]]
