"""llama.cpp by the calls of its C library (package llama-cpp-python), all sequences in one batch, on a GGUF file."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
from pathlib import Path
from typing import Any

from benchmarks.peers.exchange import Answer, Case, Job, Program, Recorder, made, serve

_BATCH_TOKENS = 512


def start(job: Job) -> Program:
    """`job.options`: gguf, the file that is served in place of the checkpoint. weights: the type that llama.cpp makes
    of its weights first (Q8_0, Q4_K_M ...), if any.
    """
    llama = importlib.import_module("llama_cpp")
    llama.llama_backend_init()
    file = _quantize(llama, job, job.options["weights"]) if "weights" in job.options else Path(job.options["gguf"])
    model = llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params())
    assert model, f"llama.cpp cannot read {file}"
    params = llama.llama_context_default_params()
    params.n_ctx = job.max_model_len * job.max_num_seqs
    params.n_batch, params.n_seq_max = _BATCH_TOKENS, job.max_num_seqs
    params.n_threads = params.n_threads_batch = job.num_threads
    context = llama.llama_init_from_model(model, params)
    num_tokens = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    engine = _Engine(llama, context, num_tokens)

    def answer(case: Case) -> Answer:
        recorder = Recorder(len(case.prompts))
        engine.clear()
        last = engine.read_prompts(case.prompts)
        for place, token in enumerate(last):
            recorder.add(place, [token])
        for step in range(1, case.num_tokens):
            positions = [len(prompt) + step - 1 for prompt in case.prompts]
            last = engine.decode([(token, positions[i], i, True) for i, token in enumerate(last)])
            for place, token in enumerate(last):
                recorder.add(place, [token])
        return recorder.answer()

    return Program(answer, file.stat().st_size)


def _quantize(llama: Any, job: Job, weights: str) -> Path:
    """The GGUF file in another type. Weights of fewer than 32 bits are made float32 first, also those of 4 bits."""
    source = Path(job.options["gguf"])
    with source.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()

    def quantize(file: Path) -> None:
        params = llama.llama_model_quantize_default_params()
        params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{weights}")
        params.allow_requantize, params.nthread = True, job.num_threads
        status = llama.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(params))
        assert status == 0, f"llama_model_quantize returned {status}"

    return made(Path(job.converted) / f"llama-{digest[:16]}-{weights}.gguf", quantize)


class _Engine:
    """Batches of (token, position, sequence, whether its next token is wanted)."""

    def __init__(self, llama: Any, context: Any, vocab_size: int) -> None:
        self._llama, self._context, self._vocab_size = llama, context, vocab_size
        self._numpy = importlib.import_module("numpy")
        self._batch = llama.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def clear(self) -> None:
        """Forget all sequences."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)

    def read_prompts(self, prompts: list[list[int]]) -> list[int]:
        """The first token of each prompt's answer."""
        rows = [
            (token, position, place, position == len(prompt) - 1)
            for place, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        first: list[int] = []
        for begin in range(0, len(rows), _BATCH_TOKENS):
            first += self.decode(rows[begin : begin + _BATCH_TOKENS])
        return first

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """The likeliest next token of each row that wants one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, is_wanted
            batch.seq_id[i][0] = sequence
        status = self._llama.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"
        return [self._argmax(i) for i, (*_, is_wanted) in enumerate(rows) if is_wanted]

    def _argmax(self, row: int) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, row)
        values = self._numpy.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,)
        )
        return int(values.argmax())


if __name__ == "__main__":
    serve(start)
