"""An engine of one wide layer, and adapters for it of random numbers."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np
import torch
from pydantic import ByteSize

from checkpoints.telling_adapters import save_plain_tokenizer
from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora_config import LoRAConfig, SourceSpec
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_wire.layout import AdapterLayout, num_values
from multilora_wire.sites import WireModule

RANKS = (8, 16, 32, 64)
PLACES = 16
"""`max_loras` of the engines that measure the device tier; as many clients keep it busy."""
_VOCABULARY = 4096
_MAX_LEN = 512
WARM_UP_TOKENS = 4


def random_wire(
    layout: AdapterLayout, rank: int, seed: int, modules: Sequence[WireModule] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """`lora_weights`, float32, and `lora_config` of an adapter of small random numbers.

    modules: that the adapter changes; by default all linears.
    """
    modules = modules or layout.sites.plain_modules
    config = torch.tensor([[module.module_id, module.layer, rank, 0] for module in modules])
    sizes = torch.tensor([num_values(module, rank) for module in modules])
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(len(config), int(sizes.max()), generator=generator) * 0.01
    weights[torch.arange(weights.shape[1]) >= sizes[:, None]] = 0
    return weights, config.int()


class Bench:
    """A model of one wide layer with random weights, and adapters for it that share their numbers but not identity.

    One layer, so that 2000 adapters fit in memory; wide, so that an adapter is a small part of it, as in real models.
    """

    def __init__(self, directory: Path, num_threads: int) -> None:
        self._directory = directory
        self._model = _save_random_model(directory / "model")
        self._num_threads = num_threads
        self.layout = checkpoint_layout(self._model, max(RANKS), "bfloat16")
        self._packed = {
            (rank, version): pack_adapter(*random_wire(self.layout, rank, rank + version), self.layout)
            for rank in RANKS
            for version in range(2)
        }
        self._request_ids = itertools.count()
        self._random = Random(0)

    @contextmanager
    def engine(
        self, max_loras: int, num_adapters: int, num_in_memory: int | None = None, source: Path | None = None
    ) -> Iterator[Engine]:
        """An engine with the adapters 0 .. num_adapters - 1.

        num_in_memory: memory holds the size of only so many adapters, and the disk tier has all; without it there is no
        disk tier, and memory holds exactly all. source: a directory from which other adapters can be fetched.
        """
        num_bytes = sum(self.adapter(task).pages.nbytes for task in range(num_in_memory or num_adapters))
        with tempfile.TemporaryDirectory(dir=self._directory) as cache:
            lora = LoRAConfig(
                max_loras=max_loras,
                max_lora_rank=max(RANKS),
                lora_dtype="bfloat16",
                lora_cache_host_memory_bytes=ByteSize(num_bytes),
                lora_cache_dir=None if num_in_memory is None else Path(cache),
                lora_on_conflict="replace",
                lora_sources=[] if source is None else [_directory_source(source)],
            )
            config = EngineConfig(
                model_path=self._model,
                device="cpu",
                num_threads=self._num_threads,
                max_num_seqs=32,
                kv_cache_memory_bytes=ByteSize(256 << 20),
                lora=lora,
            )
            engine = Engine(config)
            for task in range(num_adapters):
                engine.put_adapter(task, self.adapter(task))
                settle(engine)
            self.serve(engine, [self.request(task % num_adapters, 8, 2) for task in range(32)], 32)
            yield engine
            engine.close()

    def adapter(self, task: int, version: int = 0) -> PackedAdapter:
        """The adapter of a task id, in one of two versions: its rank is RANKS[task % 4]."""
        return self._packed[RANKS[task % len(RANKS)], version]

    def save_source(self, tasks: Iterable[int]) -> Path:
        """A directory with these adapters, as `lora_sources` takes them."""
        root = self._directory / "source"
        for task in tasks:
            weights, config = random_wire(self.layout, RANKS[task % len(RANKS)], task)
            folder = root / str(task)
            folder.mkdir(parents=True)
            np.save(folder / "model.lora_weights.npy", weights.half().numpy()[None])
            np.save(folder / "model.lora_config.npy", config.numpy()[None])
        return root

    def request(self, task: int, prompt_tokens: int, max_tokens: int) -> GenerationRequest:
        prompt = [self._random.randrange(_VOCABULARY) for _ in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, end_id=-1)
        return GenerationRequest(f"bench-{next(self._request_ids)}", prompt, sampling, task)

    def draw(self, population: int) -> int:
        """A task id below `population`: any rank as likely as another, then by Zipf's law among ids of that rank."""
        return self.draw_of_rank(self._random.randrange(len(RANKS)), population)

    def draw_of_rank(self, rank_index: int, population: int) -> int:
        """A task id below `population` of the rank RANKS[rank_index], by Zipf's law."""
        tasks = range(rank_index, population, len(RANKS))
        return self._random.choices(tasks, [1 / (place + 1) for place in range(len(tasks))])[0]

    def serve(
        self,
        engine: Engine,
        requests: Iterable[GenerationRequest],
        num_clients: int,
        after_step: Callable[[Sequence[str]], None] = lambda ended: None,
    ) -> list[list[float]]:
        """Have all requests answered, `num_clients` of them at any time; the times at which each request's tokens came.

        A request that ends is followed by another. after_step: is told the ids of the requests that a step ended.
        """
        waiting = iter(requests)
        times: dict[str, list[float]] = {}
        num_ended = 0

        def submit(request: GenerationRequest) -> None:
            times[request.request_id] = []
            engine.add_request(request)

        for request in itertools.islice(waiting, num_clients):
            submit(request)
        while num_ended < len(times):
            outputs = engine.step()
            ended = [output.request_id for output in outputs if output.is_final]
            num_ended += len(ended)
            after_step(ended)
            for output in outputs:
                times[output.request_id] += [time.perf_counter()] * len(output.token_ids)
                if output.is_final and (following := next(waiting, None)) is not None:
                    submit(following)
        settle(engine)
        return list(times.values())


def settle(engine: Engine) -> None:
    """Let an engine finish its work in the background, such as writing to disk."""
    while engine.has_work:
        engine.step()


def _directory_source(root: Path) -> SourceSpec:
    return SourceSpec.model_validate({"source": "directory", "root": str(root)})


def _save_random_model(path: Path) -> Path:
    """Save a model of one layer, as wide as a real model's."""
    save_tiny_llama(
        path,
        vocab_size=_VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=_MAX_LEN,
        initializer_range=0.02,
    )
    save_plain_tokenizer(path, _VOCABULARY)
    return path
