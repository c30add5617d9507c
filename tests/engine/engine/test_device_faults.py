"""An engine on a device that fails: in a copy, a step or a read-back, for once or for good, or for want of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
from support.adapters import wire_adapter
from support.engines import assert_idle, run_all
from support.faulty_device import ILLEGAL_ACCESS, NO_MEMORY, FaultyDevice, Place

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.batch import transfer
from multilora_engine.config import EngineConfig
from multilora_engine.engine.build import _unless_it_fails
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import ConfigError
from multilora_engine.execution import device_probe
from multilora_engine.execution.device_probe import DeviceProbe, is_device_dead
from multilora_engine.execution.graph_check import GraphFault
from multilora_engine.lora.device_tier import TableRows
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.page_copies import PageCopy
from multilora_engine.out_of_memory import is_out_of_memory
from multilora_engine.request import GenerationRequest, SamplingParams

CPU = torch.device("cpu")
PLACES = get_args(Place)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FaultyDevice:
    return FaultyDevice(monkeypatch)


@pytest.fixture(scope="module")
def only_engine(checkpoint: Path, default_model_dir: Path) -> Iterator[Engine]:
    engine = Engine(
        EngineConfig(
            model_path=checkpoint,
            tokenizer_path=default_model_dir,
            enable_async_scheduling=True,
            kv_cache_memory_bytes=1 << 20,  # type: ignore[arg-type]
        )
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(only_engine: Engine, device: FaultyDevice) -> Iterator[Engine]:
    """On a device that is sound again, and without requests, after each test."""
    yield only_engine
    only_engine._in_flight = None
    only_engine._device_probe._is_known_dead = False
    for name in ("r", "lost"):
        only_engine.abort(name)
    assert_idle(only_engine)


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, [3, 1, 4, 1, 5], SamplingParams(max_tokens=6, end_id=-1))


def run_out(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("place", PLACES)
def test_a_sticky_error_is_raised_and_the_device_is_told_to_be_dead(
    engine: Engine, device: FaultyDevice, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    assert not engine.is_device_dead()
    engine.add_request(request("r"))
    engine.step()
    device.fail(place, RuntimeError(ILLEGAL_ACCESS), is_sticky=True)
    with pytest.raises(RuntimeError, match=ILLEGAL_ACCESS):
        run_out(engine)
    assert engine.is_device_dead()
    assert f"cpu is dead: a number cannot be sent there and back: RuntimeError: {ILLEGAL_ACCESS}" in caplog.text


@pytest.mark.parametrize(
    ("place", "error"),
    [
        *((place, torch.OutOfMemoryError("CUDA out of memory")) for place in PLACES),
        *(("step", RuntimeError(text)) for text in NO_MEMORY),
    ],
)
def test_without_memory_the_requests_of_the_step_fail_and_the_next_ones_are_served(
    engine: Engine, device: FaultyDevice, place: Place, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run_all(engine, [request("before")])["before"].token_ids
    device.fail(place, error)
    (answer,) = run_all(engine, [request("lost")]).values()
    assert answer.final is not None
    assert answer.final.error_code == "INTERNAL"
    assert "the step ran out of memory: " in str(answer.final.error_message)
    assert device.num_failed == 1
    assert "a step of 1 sequences ran out of memory" in caplog.text
    assert not engine.is_device_dead()
    assert run_all(engine, [request("after")])["after"].token_ids == expected


@pytest.mark.parametrize("place", ["step", "read"])
def test_a_dead_device_that_tells_of_memory_first_fails_no_single_step(
    engine: Engine, device: FaultyDevice, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    """As cuBLAS may, whose handle cannot be made on a dead device."""
    engine.add_request(request("r"))
    monkeypatch.setattr(engine, "is_device_dead", lambda: True)
    device.fail(place, RuntimeError(NO_MEMORY[-1]))
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        run_out(engine)


@pytest.mark.parametrize("is_sticky", [False, True])
@pytest.mark.parametrize("text", [ILLEGAL_ACCESS, NO_MEMORY[0]])
def test_a_copy_of_pages_that_fails_is_its_adapters_failure_only_on_a_live_device(
    engine: Engine, device: FaultyDevice, monkeypatch: pytest.MonkeyPatch, is_sticky: bool, text: str
) -> None:
    """No step is launched: the request waits for its adapter."""
    tier, layout = engine.loras.device, engine.info.adapter_layout
    monkeypatch.setattr(tier, "_pool", PagePool(64, layout.page_bytes, CPU))

    def fail(*_: object) -> PageCopy:
        device.fail("send", RuntimeError(text), is_sticky)
        device.call("send")
        raise AssertionError

    monkeypatch.setattr(tier, "_copy_pages", fail)
    wire = wire_adapter(layout, [(1, 0, 4)])
    engine.put_adapter(7, pack_adapter(wire.weights, wire.config, layout))
    engine.add_request(msgspec.structs.replace(request("r"), lora_task_id=7))
    if is_sticky and text == ILLEGAL_ACCESS:
        with pytest.raises(RuntimeError, match=ILLEGAL_ACCESS):
            run_out(engine)
        assert engine.is_device_dead()
    else:
        outputs = [output for _ in range(2) for output in engine.step()]
        assert [output.error_code for output in outputs] == ["UNAVAILABLE"]
        assert f"copying it to the device failed: {text[:20]}" in str(outputs[0].error_message)
        assert not engine.is_device_dead()


def test_an_adapter_whose_row_could_not_be_written_for_want_of_memory_answers_rightly_the_next_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a request of the base model, which hears nothing of it."""
    layout = engine.info.adapter_layout
    wire = wire_adapter(layout, [(module, layer, 4) for module in (4, 6) for layer in (0, 1)])
    for task in (8, 9):
        engine.put_adapter(task, pack_adapter(4 * wire.weights, wire.config, layout))
    asked = msgspec.structs.replace(request("r"), lora_task_id=9)
    expected = run_all(engine, [msgspec.structs.replace(asked, lora_task_id=8)])["r"].token_ids
    of_base = run_all(engine, [request("r")])["r"].token_ids
    assert expected != of_base

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(TableRows, "write", fail)
        lost, beside = run_all(engine, [msgspec.structs.replace(asked, request_id="lost"), request("r")]).values()
    assert lost.final is not None
    assert lost.final.error_code == "UNAVAILABLE"
    assert "writing its row of the tables failed: CUDA out of memory" in str(lost.final.error_message)
    assert beside.token_ids == of_base
    assert run_all(engine, [asked])["r"].token_ids == expected


def test_an_error_that_passes_leaves_the_device_alive(engine: Engine, device: FaultyDevice) -> None:
    """The engine's requests cannot be trusted to go on, and later ones are served."""
    engine.add_request(request("lost"))
    device.fail("step", RuntimeError("CUDA error: invalid argument"))
    with pytest.raises(RuntimeError, match="invalid argument"):
        engine.step()
    assert not engine.is_device_dead()
    engine.abort("lost")
    assert run_all(engine, [request("after")])["after"].token_ids


def test_a_probe_that_finds_no_memory_finds_a_device(device: FaultyDevice) -> None:
    device.fail("send", torch.OutOfMemoryError("CUDA out of memory"), is_sticky=True)
    assert not is_device_dead(CPU)
    assert device.num_failed == 1


def test_a_device_that_hangs_is_dead(
    device: FaultyDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    end = threading.Event()

    class Event:
        def synchronize(self) -> None:
            end.wait()

    monkeypatch.setattr(transfer, "_recorded_event", Event)
    assert is_device_dead(CPU, limit_s=0.05)
    assert "cpu is dead: a number that was sent there has not come back after 0.05 s" in caplog.text
    end.set()


def test_a_device_that_was_found_dead_is_not_asked_again(device: FaultyDevice) -> None:
    probe = DeviceProbe(CPU)
    assert not probe.is_dead()
    device.fail("send", RuntimeError(ILLEGAL_ACCESS))
    assert probe.is_dead()
    assert probe.is_dead()
    assert not is_device_dead(CPU)
    assert device.num_failed == 1


def test_a_device_whose_memory_is_the_hosts_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nobody has time to answer, or whatever else is wrong with the process."""

    def fail(*_: object) -> None:
        raise RuntimeError(ILLEGAL_ACCESS)

    monkeypatch.setattr(device_probe, "to_device", fail)
    assert not is_device_dead(CPU)


def test_a_device_that_nobody_can_ask_is_not_known_to_be_dead(
    device: FaultyDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    device.fail("send", RuntimeError(ILLEGAL_ACCESS))
    monkeypatch.setattr(threading.Thread, "start", fail)
    assert not is_device_dead(CPU)
    assert "nobody can ask whether cpu is dead: can't start new thread" in caplog.text


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered", "out of memory", ""])
def test_other_errors_are_no_want_of_memory(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(NO_MEMORY[0]))


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: operation not permitted"), GraphFault("other logits")])
@pytest.mark.parametrize("is_sticky", [False, True])
@pytest.mark.parametrize("choice", ["auto", True])
def test_graphs_that_fail_are_left_out_only_where_they_may_be_and_the_device_is_alive(
    checkpoint: Path,
    device: FaultyDevice,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    is_sticky: bool,
    choice: object,
) -> None:
    config = EngineConfig(model_path=checkpoint, enable_cuda_graphs=choice)  # type: ignore[arg-type]

    def capture() -> None:
        device.fail("step", error, is_sticky)
        device.call("step")

    if is_sticky or choice is True:
        with pytest.raises(type(error)):
            _unless_it_fails(capture, config, 0, "decode steps", CPU)
        assert "launched kernel by kernel" not in caplog.text
    else:
        assert _unless_it_fails(capture, config, 0, "decode steps", CPU) is None
        assert f"which is slower: CUDA graphs failed: {error}" in caplog.text


@pytest.mark.parametrize("choice", ["auto", True])
@pytest.mark.parametrize("ends_badly", [False, True])
def test_graphs_that_find_no_memory_stop_the_load_with_the_numbers(
    checkpoint: Path, device: FaultyDevice, monkeypatch: pytest.MonkeyPatch, choice: object, ends_badly: bool
) -> None:
    """ends_badly: the end of a capture whose beginning has failed fails, too, and that error is the one raised."""
    options = {"enable_cuda_graphs": choice, "gpu_memory_utilization": 0.97}
    config = EngineConfig.model_validate({"model_path": checkpoint, **options})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 28, 80 << 30))

    @contextmanager
    def ended() -> Iterator[None]:
        try:
            yield
        finally:
            if ends_badly:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def capture() -> None:
        device.fail("step", torch.OutOfMemoryError("CUDA out of memory"))
        with ended():
            device.call("step")

    told = r"steps with prompts do not fit: 3\.25 GiB were kept free for graphs, and 0\.25 of 80\.00 GiB are free now; "
    with pytest.raises(
        ConfigError, match=told + r"write a smaller gpu_memory_utilization \(it is 0\.97\), max_num_seqs"
    ):
        _unless_it_fails(capture, config, 13 << 28, "steps with prompts", CPU)
