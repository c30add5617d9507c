"""llama.cpp's server, by the package xllamacpp, asked over HTTP. It batches requests of one set of adapters only."""

from __future__ import annotations

import importlib
import json
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peers.exchange import Answer, Case, Job, Recorder, serve

_DATA = b"data: "


def start(job: Job) -> Callable[[Case], Answer]:
    """It reads the GGUF file of the model and of each adapter."""
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = job.gguf[job.dtype]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job.num_threads
    params.n_parallel = job.max_num_seqs
    params.n_ctx = job.max_num_seqs * job.max_model_len
    params.cont_batching = True
    params.warmup = True
    params.lora_init_without_apply = True
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(f"{adapter}.gguf", 0.0) for adapter in job.adapters]
    server = xllamacpp.Server(params)

    def stream(prompt: list[int], adapter: int | None, num_tokens: int) -> Iterator[list[int]]:
        body: dict[str, Any] = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
            "lora": [] if adapter is None else [{"id": adapter, "scale": 1.0}],
        }
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            for line in response:
                if line.startswith(_DATA):
                    yield json.loads(line.removeprefix(_DATA))["tokens"]

    def answer(case: Case) -> Answer:
        recorder = Recorder(len(case.prompts))

        def run(place: int) -> None:
            for tokens in stream(case.prompts[place], case.adapters[place], case.num_tokens):
                recorder.add(place, tokens)

        with ThreadPoolExecutor(len(case.prompts)) as pool:
            list(pool.map(run, range(len(case.prompts))))
        return recorder.answer()

    return answer


if __name__ == "__main__":
    serve(start)
