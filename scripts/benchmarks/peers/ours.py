"""multilora's engine, in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.peers.exchange import Answer, Case, Job, Recorder, serve
from multilora_client.convert import convert_peft
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.gguf.checkpoint import prepare_gguf
from multilora_engine.lora.format import pack_adapter
from multilora_engine.request import GenerationRequest, SamplingParams


def start(job: Job) -> Callable[[Case], Answer]:
    """`job.options` are parameters of the engine, but for the adapters' type, lora_dtype."""
    options, model = dict(job.options), Path(job.model)
    lora = {
        "max_loras": max(1, len(job.adapters)),
        "max_lora_rank": job.rank,
        "lora_dtype": options.pop("lora_dtype", "auto"),
    }
    engine = Engine(
        EngineConfig.model_validate(
            {
                "model_path": str(prepare_gguf(model) if model.suffix == ".gguf" else model),
                "device": "cpu",
                "dtype": job.dtype,
                "num_threads": job.num_threads,
                "max_num_seqs": job.max_num_seqs,
                "enable_prefix_caching": False,
                "lora": lora,
                **options,
            }
        )
    )
    for task_id, adapter in enumerate(job.adapters):
        tensors = convert_peft(Path(adapter), "float32")
        weights, config = torch.from_numpy(tensors.weights), torch.from_numpy(tensors.config)
        engine.put_adapter(task_id, pack_adapter(weights, config, engine.info.adapter_layout))
    numbers = itertools.count()

    def answer(case: Case) -> Answer:
        recorder, places = Recorder(len(case.prompts)), dict[str, int]()
        sampling = SamplingParams(max_tokens=case.num_tokens, end_id=-1)
        for place, (prompt, task_id) in enumerate(zip(case.prompts, case.adapters, strict=True)):
            request_id = str(next(numbers))
            places[request_id] = place
            engine.add_request(GenerationRequest(request_id, prompt, sampling, task_id))
        while engine.has_work:
            for output in engine.step():
                recorder.add(places[output.request_id], list(output.token_ids))
        return recorder.answer()

    return answer


if __name__ == "__main__":
    serve(start)
