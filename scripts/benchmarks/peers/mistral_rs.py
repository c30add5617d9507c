"""mistral.rs by its Python package. It takes prompts as text alone, so that those of the cases must be text as well."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.peers.exchange import Answer, Case, Job, Recorder, made, serve

_TEMPLATE = "{{ messages[0]['content'] }}"
"""A chat is its text: the chat's endpoint is the one that streams and tells token ids."""


def start(job: Job) -> Callable[[Case], Answer]:
    if job.dtype == "float32":
        os.environ["MISTRALRS_CPU_KV_F32"] = "1"  # Its KV cache is float16 otherwise.
    mistralrs = importlib.import_module("mistralrs")
    template = Path(job.scratch) / "plain.jinja"
    template.write_text(_TEMPLATE)
    runner = mistralrs.Runner(
        _which(mistralrs, job), max_seqs=job.max_num_seqs, prefix_cache_n=0, jinja_explicit=str(template)
    )
    sending = Lock()  # Two calls at once end with "Already borrowed".

    def request(prompt: list[int], adapter: int | None, num_tokens: int) -> Any:
        text = runner.detokenize_text(prompt, False)
        if runner.tokenize_text(text, False, None) != prompt:
            raise ValueError(f"no text gives the tokens {prompt}")
        return mistralrs.ChatCompletionRequest(
            messages=[{"role": "user", "content": text}],
            model="default",
            max_tokens=num_tokens,
            temperature=0.0,
            stream=True,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=1,
            adapter=None if adapter is None else str(adapter),
        )

    def answer(case: Case) -> Answer:
        requests = [request(*each, case.num_tokens) for each in zip(case.prompts, case.adapters, strict=True)]
        recorder = Recorder(len(requests))

        def run(place: int) -> None:
            with sending:
                chunks = runner.send_chat_completion_request(requests[place])
            for chunk in chunks:
                (choice,) = chunk.choices
                if choice.logprobs:
                    recorder.add(place, [choice.logprobs.top_logprobs[0].token])

        with ThreadPoolExecutor(len(requests)) as pool:
            list(pool.map(run, range(len(requests))))
        return recorder.answer()

    return answer


def _which(mistralrs: Any, job: Job) -> Any:
    """The model that it loads, with the adapters."""
    adapters = [mistralrs.LoraAdapter(str(number), source) for number, source in enumerate(job.adapters)]
    dtype = {"float32": mistralrs.ModelDType.F32, "bfloat16": mistralrs.ModelDType.BF16}[job.dtype]
    model = Path(job.model)
    if model.suffix == ".gguf":
        return mistralrs.Which.GGUF(str(model.parent), model.name, dtype=dtype, adapters=adapters)
    return mistralrs.Which.Lora(str(_with_rope_theta(job)), adapters=adapters, dtype=dtype)


def _with_rope_theta(job: Job) -> Path:
    """The checkpoint with `rope_theta` where transformers 4 had it: mistral.rs does not read `rope_parameters`."""

    def write(folder: Path) -> None:
        folder.mkdir()
        for file in Path(job.model).absolute().iterdir():
            (folder / file.name).symlink_to(file)
        config = folder / "config.json"
        fields = json.loads(config.read_text())
        config.unlink()
        config.write_text(json.dumps({"rope_theta": fields["rope_parameters"]["rope_theta"], **fields}))

    return made(Path(job.converted) / "mistral-rs", write)


if __name__ == "__main__":
    serve(start)
