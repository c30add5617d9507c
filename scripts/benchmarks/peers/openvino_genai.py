"""OpenVINO GenAI's continuous batching, after an export of the checkpoint by optimum-intel. It serves no adapters here:
its batches take one set of adapters, merged into the weights' products, for all requests.
"""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.exchange import Answer, Case, Job, Recorder, made, serve

_PRECISIONS = {"float32": {"INFERENCE_PRECISION_HINT": "f32"}, "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"}}


def start(job: Job) -> Callable[[Case], Answer]:
    genai, openvino, numpy = (importlib.import_module(name) for name in ("openvino_genai", "openvino", "numpy"))
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_seqs = job.max_num_seqs
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": job.num_threads} | _PRECISIONS[job.dtype]
    exported = _export(job)
    pipeline = genai.ContinuousBatchingPipeline(str(exported), scheduler, "CPU", properties)
    numbers = itertools.count()

    def answer(case: Case) -> Answer:
        recorder = Recorder(len(case.prompts))
        config = genai.GenerationConfig(max_new_tokens=case.num_tokens, ignore_eos=True, do_sample=False)
        ids = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in case.prompts]
        handles = [pipeline.add_request(next(numbers), prompt, config) for prompt in ids]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for place, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        recorder.add(place, list(output.generated_ids))
        return recorder.answer()

    return answer


def _export(job: Job) -> Path:
    """The checkpoint in OpenVINO's format."""

    def export(folder: Path) -> None:
        command = Path(sys.executable).with_name("optimum-cli")
        arguments = ["--model", job.model, "--task", "text-generation-with-past", "--weight-format", "fp32"]
        subprocess.run([command, "export", "openvino", *arguments, folder], check=True)

    return made(Path(job.converted) / "openvino-fp32", export)


if __name__ == "__main__":
    serve(start)
