"""Log-probs of prompts' tokens against transformers and PEFT, and that nobody else notices them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.engines import Answer, assert_idle, poison_claimed_blocks, run_all
from support.oracle import ATTENTION, MLP, Oracle, packed
from support.tensor_memory import peak_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from multilora_engine.batch.forward_batch import ForwardBatch
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.execution import model_runner
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.models.decoder import Decoder
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sampling.sampler import WORK_BYTES_PER_LOGIT, Best
from multilora_engine.sequences.prompt_log_probs import row_type

TOLERANCE = 1e-3
VOCAB_SIZE = 311
NUM_TOPS = (0, 3, 20)
LENGTHS = (1, 2, 15, 16, 17, 33, 70, 129)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder := tmp_path_factory.mktemp("checkpoint"))
    oracle = Oracle(model, folder)
    oracle.add_random("rank 7", 7, ATTENTION + MLP, seed=1)
    oracle.add_random("rank 16", 16, ["down_proj", "v_proj"], seed=2, use_rslora=True)
    return oracle


def make_engine(oracle: Oracle, tokenizer: Path, **options: Any) -> Engine:
    folder = next(iter(oracle.adapters.values())).parent
    config = EngineConfig(
        model_path=folder,
        tokenizer_path=tokenizer,
        num_threads=2,
        lora=LoRAConfig(lora_cache_host_memory_bytes=512 << 20),
        **{"kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 5, **options},
    )
    engine = Engine(config)
    for task_id, directory in enumerate(oracle.adapters.values()):
        engine.put_adapter(task_id, packed(directory, engine.info.adapter_layout, folder))
    return engine


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def scoring(name: str, prompt: list[int], task: int | None, num_top: int, **sampling: Any) -> GenerationRequest:
    wanted = {"return_prompt_log_probs": True, "num_prompt_top_log_probs": num_top}
    parameters = SamplingParams(**{"max_tokens": 3, "end_id": -1, **wanted, **sampling})
    return GenerationRequest(name, prompt, parameters, lora_task_id=task)


def many_requests() -> list[GenerationRequest]:
    """Every length with every adapter, one in three without any token to answer with."""
    return [
        scoring(f"{length} {task}", prompt_of(length, seed=length), task, NUM_TOPS[i % 3], max_tokens=(i % 3) * 2)
        for i, length in enumerate(LENGTHS)
        for task in (None, 0, 1)
    ]


def rows_of(request: GenerationRequest, answer: Answer) -> NDArray[Any]:
    return np.frombuffer(answer.prompt_log_probs, row_type(request.sampling.num_prompt_top_log_probs))


def assert_as_transformers(oracle: Oracle, request: GenerationRequest, answer: Answer) -> None:
    prompt, num_top = request.prompt_token_ids, request.sampling.num_prompt_top_log_probs
    name = None if request.lora_task_id is None else [*oracle.adapters][request.lora_task_id]
    rows = rows_of(request, answer)
    assert len(rows) == len(prompt)
    assert rows["log_prob"][0] == 0
    if len(prompt) == 1:
        return
    expected = oracle.logits(name, prompt[:1], prompt[1:]).log_softmax(dim=-1)
    chosen = expected.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1)
    np.testing.assert_allclose(rows["log_prob"][1:], chosen, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(rows["top_log_probs"][1:], expected.topk(num_top).values, rtol=0, atol=TOLERANCE)
    told = expected.gather(1, torch.from_numpy(rows["top_ids"][1:].astype(np.int64)))
    np.testing.assert_allclose(rows["top_log_probs"][1:], told, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("max_num_batched_tokens", [7, 24, 64, 65, 2048])
@pytest.mark.parametrize("enable_async_scheduling", [False, True])
def test_they_are_those_of_transformers_and_peft_in_chunks_of_any_size(
    oracle: Oracle, default_model_dir: Path, max_num_batched_tokens: int, enable_async_scheduling: bool
) -> None:
    engine = make_engine(
        oracle,
        default_model_dir,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_async_scheduling=enable_async_scheduling,
    )
    requests = many_requests()
    answers = run_all(engine, requests)
    for request in requests:
        answer = answers[request.request_id]
        assert_as_transformers(oracle, request, answer)
        assert len(answer.token_ids) == request.sampling.max_tokens
        assert answer.final is not None
        assert (answer.final.finish_reason, answer.final.num_cached_tokens) == ("length", 0)


def test_adapters_change_them(oracle: Oracle, default_model_dir: Path) -> None:
    engine = make_engine(oracle, default_model_dir)
    requests = [scoring(str(task), prompt_of(40, seed=1), task, 0) for task in (None, 0, 1)]
    told = [rows_of(request, run_all(engine, [request])[request.request_id])["log_prob"] for request in requests]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(told[one] - told[other]).max() > 0.1


def test_preemption_and_poisoned_blocks_neither_lose_nor_repeat_them(oracle: Oracle, default_model_dir: Path) -> None:
    roomy = make_engine(oracle, default_model_dir)
    bytes_per_token = (8 << 20) // roomy.info.kv_cache_tokens
    engine = make_engine(
        oracle,
        default_model_dir,
        max_num_batched_tokens=24,
        block_size=8,
        max_model_len=128,
        kv_cache_memory_bytes=160 * bytes_per_token + 160,
    )
    poison_claimed_blocks(engine)
    # The stop word never comes, but holds tokens back: the first output may come after a preemption.
    requests = [
        scoring(f"r{i}", prompt_of(30 + i, seed=i), (None, 0, 1)[i % 3], 3, max_tokens=40, stop_words=("\x00\x00",))
        for i in range(9)
    ]
    answers = run_all(engine, requests)
    assert engine.stats.num_preemptions > 0
    for request in requests:
        assert_as_transformers(oracle, request, answers[request.request_id])


def test_they_come_with_the_first_output_and_only_for_those_who_asked(oracle: Oracle, default_model_dir: Path) -> None:
    engine = make_engine(oracle, default_model_dir)
    asked = scoring("asked", prompt_of(20, seed=1), 0, 2)
    silent = GenerationRequest("silent", asked.prompt_token_ids, SamplingParams(max_tokens=3, end_id=-1))
    for request in (asked, silent):
        engine.add_request(request)
    sizes: dict[str, list[int]] = {"asked": [], "silent": []}
    while engine.has_work:
        for output in engine.step():
            sizes[output.request_id].append(len(output.prompt_log_probs))
    assert sizes == {"asked": [20 * row_type(2).itemsize, 0, 0], "silent": [0, 0, 0]}


def test_nothing_of_the_prompt_comes_from_the_cache_but_others_find_it_there(
    oracle: Oracle, default_model_dir: Path
) -> None:
    engine = make_engine(oracle, default_model_dir)
    prompt = prompt_of(40, seed=5)
    for _ in range(2):
        request = scoring("r", prompt, 1, 1)
        assert_as_transformers(oracle, request, run_all(engine, [request])["r"])
    plain = GenerationRequest("plain", prompt, SamplingParams(max_tokens=3, end_id=-1), lora_task_id=1)
    final = run_all(engine, [plain])["plain"].final
    assert final is not None
    assert final.num_cached_tokens == 32


def test_an_abort_in_the_midst_of_a_prompt_tells_nothing_of_it(oracle: Oracle, default_model_dir: Path) -> None:
    engine = make_engine(oracle, default_model_dir, max_num_batched_tokens=16)
    engine.add_request(scoring("r", prompt_of(40, seed=5), None, 1))
    engine.step()
    output = engine.abort("r")
    assert output is not None
    assert (output.finish_reason, output.prompt_log_probs) == ("cancelled", b"")
    assert_idle(engine)


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_logits_of_many_tokens_never_exist_at_once(
    oracle: Oracle, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """Whether they are scored, or the client gets them."""
    num_rows: list[int] = []
    logits = Decoder.logits

    def counted(model: Decoder, hidden_states: Any, rows: torch.Tensor, lora: Any) -> torch.Tensor:
        num_rows.append(len(rows))
        return logits(model, hidden_states, rows, lora)

    monkeypatch.setattr(Decoder, "logits", counted)
    engine = make_engine(oracle, default_model_dir, max_num_batched_tokens=512)
    requests = [scoring(f"r{i}", prompt_of(129, seed=i), None, 1, max_tokens=0) for i in range(3)]
    if is_kept:
        sampling = SamplingParams(max_tokens=0, return_context_logits=True)
        requests = [msgspec.structs.replace(request, sampling=sampling) for request in requests]
    run_all(engine, requests)
    assert sum(num_rows) == 3 * (129 + is_kept)
    assert max(num_rows) <= model_runner.ROWS_AT_ONCE


def test_the_log_probs_of_a_piece_take_half_of_what_is_kept_free_for_choices() -> None:
    """The other half may be that of the choice before, in asynchronous steps."""
    logits = torch.randn(model_runner.ROWS_AT_ONCE, 4096, generator=torch.Generator().manual_seed(1))
    token_ids = torch.arange(len(logits))
    peak = peak_bytes(lambda: model_runner._log_probs(logits, token_ids, 20)) + logits.nbytes
    assert 0.5 * WORK_BYTES_PER_LOGIT / 2 < peak / logits.numel() <= WORK_BYTES_PER_LOGIT / 2


class RecordingGraphs:
    """Serve every step, as far as they are concerned, and note the positions of those they get."""

    def __init__(self, engine: Engine) -> None:
        self.positions: list[int] = []
        self.sizes = [1]
        self._runner = engine._runner

    def serves(self, batch: ForwardBatch) -> bool:
        return True

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, Best]:
        self.positions += batch.positions.tolist()
        logits = self._runner._model.forward(batch, self._runner._kv_cache)
        return logits, Best.of(logits)


def test_graphs_which_give_logits_only_are_passed_by_where_more_is_wanted(
    oracle: Oracle, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(oracle, default_model_dir, max_num_batched_tokens=1, max_num_seqs=1)
    graphs = RecordingGraphs(engine)
    monkeypatch.setattr(engine._runner, "_graphs", graphs)
    request = scoring("r", prompt_of(6, seed=1), 0, 3, max_tokens=3)
    assert_as_transformers(oracle, request, run_all(engine, [request])["r"])
    assert graphs.positions == [5, 6, 7]


class RecordingPieces(RecordingGraphs):
    """The same in the place of pieces, which give what the head reads."""

    def run(self, batch: ForwardBatch, on_layer: Any) -> Any:
        self.positions += batch.positions.tolist()
        return self._runner._model.hidden_states(batch, self._runner._kv_cache, on_layer)


@pytest.mark.parametrize("is_kept", [False, True])
def test_steps_that_tell_of_whole_prompts_are_replayed_in_pieces(
    oracle: Oracle, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    engine = make_engine(oracle, default_model_dir)
    pieces = RecordingPieces(engine)
    monkeypatch.setattr(engine._runner, "_pieces", pieces)
    request = scoring("r", prompt_of(40, seed=1), 0, 3, max_tokens=1, return_context_logits=is_kept)
    assert_as_transformers(oracle, request, run_all(engine, [request])["r"])
    assert pieces.positions == list(range(40))


def test_they_change_no_token_of_an_answer(oracle: Oracle, default_model_dir: Path) -> None:
    engine = make_engine(oracle, default_model_dir, max_num_batched_tokens=32)
    requests = [scoring(f"r{i}", prompt_of(30 + i, seed=i), (None, 0)[i % 2], 2, max_tokens=20) for i in range(6)]
    silent = [
        msgspec.structs.replace(r, sampling=msgspec.structs.replace(r.sampling, return_prompt_log_probs=False))
        for r in requests
    ]
    told = {name: answer.token_ids for name, answer in run_all(engine, requests).items()}
    assert told == {name: answer.token_ids for name, answer in run_all(engine, silent).items()}
