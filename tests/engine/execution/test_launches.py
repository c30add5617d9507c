"""How much work a decode step of the GPU path hands to a device: launches, copies, and waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.gpu_path import NUM_LAYERS, make_device, make_engine
from support.recorded_graph import RecordedPieces

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_engine.batch.forward_batch import ForwardBatch
from multilora_engine.execution.cuda_graphs import DecodeGraphs, DecodeInputs
from multilora_engine.execution.piecewise_graphs import PiecewiseGraphs
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sampling import sampler
from multilora_kernels import streams
from multilora_kernels.cuda import dependent_launch

LAUNCHES_OF_A_LAYER = {
    "add_rms_norm_kernel": 2,
    "aten::linear": 4,
    "shrink_rows_kernel": 4,
    # That of gate and up activates, too.
    "expand_rows_kernel": 4,
    "decode_kernel": 1,
}
LAUNCHES_WITHOUT_ADAPTERS = {"add_rms_norm_kernel": 2, "aten::linear": 4, "decode_kernel": 1, "activation_kernel": 1}
"""Of a layer."""
LAUNCHES_OUTSIDE = {
    "aten::embedding": 1,
    "aten::zeros_like": 1,
    # Of rotary embeddings.
    "aten::mul": 1,
    "aten::cos": 1,
    "aten::sin": 1,
    # Of the rows whose logits are wanted.
    "aten::index_select": 2,
    "add_rms_norm_kernel": 1,
    # Of the head.
    "aten::mm": 1,
    # Of the chosen tokens.
    "aten::argmax": 1,
    "aten::gather": 1,
    "aten::cat": 1,
}


@pytest.mark.parametrize("tasks", [(None, 0, 1), (None, None)])
def test_a_decode_step_is_few_launches_one_copy_and_one_wait(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tasks: tuple[int | None, ...]
) -> None:
    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir)
    device.serve(monkeypatch)
    for n, task in enumerate(tasks):
        sampling = SamplingParams(max_tokens=8, end_id=-1)
        engine.add_request(GenerationRequest(f"r{n}", [5, 6, 7], sampling, lora_task_id=task))
    with device:
        # The prompts, and the first step of decodes, which makes memory that others use again.
        engine.step()
        engine.step()
        device.launches.clear()
        device.copies.clear()
        engine.step()
    of_a_layer = LAUNCHES_WITHOUT_ADAPTERS if tasks == (None, None) else LAUNCHES_OF_A_LAYER
    assert device.launches == _of_layers(of_a_layer) + Counter(LAUNCHES_OUTSIDE)
    assert device.copies == {"to the device": 1, "from the device": 2, "wait": 1}


def test_a_bias_of_gate_and_up_is_added_before_the_activation(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir, partial(save_tiny_llama, mlp_bias=True))
    device.serve(monkeypatch)
    engine.add_request(GenerationRequest("r", [5, 6, 7], SamplingParams(max_tokens=8, end_id=-1), lora_task_id=0))
    with device:
        engine.step()
        engine.step()
        device.launches.clear()
        engine.step()
    of_biases = Counter({"aten::add_": 2 * NUM_LAYERS, "activation_kernel": NUM_LAYERS})
    assert device.launches == _of_layers(LAUNCHES_OF_A_LAYER) + Counter(LAUNCHES_OUTSIDE) + of_biases


def test_penalties_and_bans_are_a_launch_each_and_one_copy_whatever_the_host_knows(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir, enable_async_scheduling=True)
    device.serve(monkeypatch)
    options = {"repetition_penalty": 1.1, "frequency_penalty": 0.2}, {"bad_token_sequences": ((4,), (7, 8))}
    for n, option in enumerate(options):
        sampling = SamplingParams(max_tokens=8, min_tokens=8, **option)  # type: ignore[arg-type]
        engine.add_request(GenerationRequest(f"r{n}", [5, 6, 7], sampling))
    with device:
        engine.step()
        engine.step()
        device.launches.clear()
        device.copies.clear()
        engine.step()
    # The last tokens of the sequences are looked up; those that are pending are set as inputs of the step.
    assert device.launches - Counter(LAUNCHES_OUTSIDE) - _of_layers(LAUNCHES_WITHOUT_ADAPTERS) == {
        "penalise_kernel": 1,
        "forbid_kernel": 1,
        "aten::index_select": 1,
        "aten::index": 1,
        "aten::index_put_": 1,
    }
    assert device.copies == {"to the device": 2, "from the device": 2, "wait": 1}


def test_a_drawn_token_takes_one_launch_and_nothing_is_sorted(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir)
    device.serve(monkeypatch)
    # A kernel that does not run leaves any numbers behind.
    token_ids, sample_tokens = torch.zeros(2, dtype=torch.int64), sampler.sample_tokens
    monkeypatch.setattr(sampler, "sample_tokens", lambda *arguments: (sample_tokens(*arguments), token_ids)[1])
    for n in range(2):
        sampling = SamplingParams(max_tokens=8, end_id=-1, temperature=0.8, top_k=20 * n, top_p=0.9, seed=n)
        engine.add_request(GenerationRequest(f"r{n}", [5, 6, 7], sampling))
    with device:
        engine.step()
        engine.step()
        device.launches.clear()
        engine.step()
    assert device.launches - Counter(LAUNCHES_OUTSIDE) - _of_layers(LAUNCHES_WITHOUT_ADAPTERS) == {"sample_kernel": 1}


def test_prompts_beside_decodes_are_attended_to_by_one_kernel_of_each_kind_a_layer_and_never_by_torch(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir)
    device.serve(monkeypatch)
    with device:
        engine.add_request(GenerationRequest("decode", [5, 6, 7], SamplingParams(max_tokens=8, end_id=-1)))
        engine.step()
        engine.step()
        for n in range(3):
            engine.add_request(GenerationRequest(f"r{n}", [5] * (n + 2), SamplingParams(max_tokens=8, end_id=-1)))
        device.launches.clear()
        engine.step()
    # Rotation and cache of all prompts, and their attention, beside the decodes, which do it all in one.
    of_prompts = Counter(rotate_and_store_kernel=NUM_LAYERS, prompt_kernel=NUM_LAYERS)
    assert device.launches == _of_layers(LAUNCHES_WITHOUT_ADAPTERS) + Counter(LAUNCHES_OUTSIDE) + of_prompts


def test_prompts_with_adapters_are_activated_with_their_update(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir)
    device.serve(monkeypatch)
    with device:
        for tasks in ((0,), (None, 0)):
            for n, task in enumerate(tasks):
                sampling = SamplingParams(max_tokens=1)
                engine.add_request(GenerationRequest(f"r{n}", [5, 6, 7], sampling, lora_task_id=task))
            device.launches.clear()
            engine.step()
    of_updates = {"shrink_kernel": 4 * NUM_LAYERS, "expand_kernel": 4 * NUM_LAYERS, "activation_kernel": 0}
    assert {name: device.launches[name] for name in of_updates} == of_updates


def test_a_captured_decode_step_is_a_launch_for_its_inputs_and_the_graph(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir)
    runner, block_size = engine._runner, engine._blocks.block_size
    inputs = DecodeInputs(4, 9, block_size, engine.stats.num_blocks, engine._loras.device.tables)

    def forward(batch: ForwardBatch, logits: torch.Tensor) -> None:
        logits.zero_()

    runner._graphs = DecodeGraphs(forward, inputs, [4], VOCAB_SIZE, torch.device("cpu"), lambda run: lambda: None)
    device.serve(monkeypatch)
    for n, task in enumerate((None, 0, 1)):
        sampling = SamplingParams(max_tokens=8, end_id=-1)
        engine.add_request(GenerationRequest(f"r{n}", [5, 6, 7], sampling, lora_task_id=task))
    with device:
        engine.step()
        engine.step()
        device.launches.clear()
        device.copies.clear()
        engine.step()
    assert device.launches == {"fill_kernel": 1}
    assert device.copies == {"to the device": 1, "from the device": 2, "wait": 1}


class _IdlePieces(RecordedPieces):
    """Whose replays compute nothing."""

    def end(self) -> Callable[[], None]:
        super().end()
        return lambda: None


def test_a_step_of_prompts_in_pieces_is_two_launches_a_layer_beside_the_graphs(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir)
    runner = engine._runner
    device.serve(monkeypatch)
    with device:
        runner._pieces = PiecewiseGraphs(
            runner._model, runner._kv_cache, engine._loras.device.tables, [16], _IdlePieces()
        )
        # The first request brings its adapter to the device.
        for tasks in ((0,), (None, 0)):
            for n, task in enumerate(tasks):
                sampling = SamplingParams(max_tokens=1)
                engine.add_request(GenerationRequest(f"r{n}", [5, 6, 7], sampling, lora_task_id=task))
            device.launches.clear()
            engine.step()
    of_attention = {"rotate_and_store_kernel": NUM_LAYERS, "prompt_kernel": NUM_LAYERS}
    outside = Counter(LAUNCHES_OUTSIDE)
    for name in ("aten::embedding", "aten::zeros_like", "segment_kernel"):
        # Of the first piece.
        del outside[name]
    assert device.launches == outside + Counter(of_attention) + Counter({"fill_kernel": 1})


@pytest.fixture
def dependent_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are those of a GPU that has them."""
    monkeypatch.setattr(dependent_launch, "capability", lambda device: dependent_launch.LEAST_CAPABILITY)
    monkeypatch.setattr(dependent_launch, "_fault_of_trial", lambda device: "")
    dependent_launch.launches_dependently.cache_clear()
    yield
    dependent_launch.launches_dependently.cache_clear()


@pytest.mark.usefixtures("dependent_launches")
@pytest.mark.parametrize(
    ("tasks", "before", "launches_dependents", "num_activations"),
    [((None, 0, 1), "expand_rows_kernel", True, 0), ((None, None), "aten::linear", False, NUM_LAYERS)],
)
def test_dependent_launches_of_a_decode_step_follow_kernels_and_never_where_streams_join(
    tmp_path: Path,
    default_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tasks: tuple[int | None, ...],
    before: str,
    launches_dependents: bool,
    num_activations: int,
) -> None:
    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir)
    device.serve(monkeypatch)
    # As in a capture.
    monkeypatch.setattr(streams, "_is_captured", lambda device: True)
    monkeypatch.setattr(streams, "_on_second", lambda device: nullcontext())
    monkeypatch.setattr(streams, "_recorded_event", lambda: None)
    monkeypatch.setattr(streams, "_wait", lambda event: device.order.append(("wait", {})))
    for n, task in enumerate(tasks):
        sampling = SamplingParams(max_tokens=8, end_id=-1)
        engine.add_request(GenerationRequest(f"r{n}", [5, 6, 7], sampling, lora_task_id=task))
    with device:
        engine.step()
        engine.step()
        device.order.clear()
        engine.step()
    pairs = Counter(
        (first, second, options.get("LAUNCHES_DEPENDENTS", False))
        for (first, options), (second, own) in pairwise(device.order)
        if own.get("launch_pdl")
    )
    expected = {
        ("aten::zeros_like", "add_rms_norm_kernel", False): 1,
        (before, "decode_kernel", launches_dependents): NUM_LAYERS,
        (before, "add_rms_norm_kernel", launches_dependents): 2 * NUM_LAYERS - 1,
        (before, "activation_kernel", launches_dependents): num_activations,
        ("aten::index_select", "add_rms_norm_kernel", False): 1,
    }
    assert pairs == Counter(expected)
    assert all(own["IS_DEPENDENT"] for _, own in device.order if own.get("launch_pdl"))


def _of_layers(of_a_layer: Mapping[str, int]) -> Counter[str]:
    return Counter({name: count * NUM_LAYERS for name, count in of_a_layer.items()})


def test_a_step_is_within_its_budget_of_launches() -> None:
    # Each takes the host some microseconds, where the step is in no graph. An update of adapters is two of them, since
    # two took a GPU less time than one.
    assert sum(LAUNCHES_OF_A_LAYER.values()) <= 15
    assert sum(LAUNCHES_OUTSIDE.values()) <= 15
