"""The resources of the GPU kernels, compiled here for GPUs that are not there: a table, a CSV and a plot."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.lora_workloads import Model
from multilora_kernels.segments import CHUNK_SIZE, PREFILL_CHUNK_SIZE

GPUS = (80, 86, 89, 90, 100, 120)
"""Compute capabilities: sm_80 and so on."""

_HEAD_DIM, _GROUP, _BLOCK_SIZE, _VOCAB_SIZE = 128, 4, 16, 128256
"""The sizes of the attention of a model with 8 billion parameters."""


@dataclass(frozen=True)
class Used:
    """The resources of one kernel on one GPU generation. shape: of the linear and its adapters, empty without one."""

    kernel: str
    shape: str
    gpu: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    widest_load: int

    @property
    def name(self) -> str:
        """Kernel and shape."""
        return f"{self.kernel} {self.shape}".strip()

    @property
    def shared_kib(self) -> float:
        return self.shared_bytes / 1024


def compilations(model: Model) -> list[Callable[[], Used]]:
    """One for each kernel, shape and GPU generation; each compiles when called."""
    # Imported here: Triton comes with the CUDA builds of torch only.
    from benchmarks import compiled_kernels

    def compilation(
        kernel: str, shape: str, gpu: int, resources: Callable[[int], compiled_kernels.Resources]
    ) -> Callable[[], Used]:
        def run() -> Used:
            used = resources(gpu)
            return Used(
                kernel, shape, f"sm_{gpu}", used.registers, used.spilled_bytes, used.shared_bytes, used.widest_load
            )

        return run

    linears = dict(zip(("q|k|v", "o", "gate|up", "down"), model.linears, strict=True))
    halves = {"shrink": compiled_kernels.shrink_resources, "expand": compiled_kernels.expand_resources}
    hidden = model.linears[0].in_features
    others: dict[str, Callable[[int], compiled_kernels.Resources]] = {
        "decode attention": lambda gpu: compiled_kernels.decode_resources(_GROUP, _HEAD_DIM, _BLOCK_SIZE, "bf16", gpu),
        "prompt attention": lambda gpu: compiled_kernels.prompt_resources(_GROUP, _HEAD_DIM, _BLOCK_SIZE, "bf16", gpu),
        "rotation": lambda gpu: compiled_kernels.rotation_resources(_HEAD_DIM, "bf16", gpu),
        "segments": lambda gpu: compiled_kernels.segment_resources(64, gpu),
        "add_rms_norm": lambda gpu: compiled_kernels.add_rms_norm_resources(hidden, "bf16", gpu),
        "silu_mul": lambda gpu: compiled_kernels.silu_mul_resources("bf16", gpu),
        "sample_tokens": lambda gpu: compiled_kernels.sample_resources(_VOCAB_SIZE, gpu),
    }
    todo = []
    for half, linear, rank, chunk in itertools.product(halves, linears, (16, 64), (CHUNK_SIZE, PREFILL_CHUNK_SIZE)):

        def resources(
            gpu: int, half: str = half, linear: str = linear, rank: int = rank, chunk: int = chunk
        ) -> compiled_kernels.Resources:
            return halves[half](linears[linear], chunk, rank, "bf16", gpu)

        todo += [compilation(half, f"{linear} rank {rank} chunk {chunk}", gpu, resources) for gpu in GPUS]
    for linear, rank in itertools.product(linears, (16, 64)):

        def update(gpu: int, linear: str = linear, rank: int = rank) -> compiled_kernels.Resources:
            return compiled_kernels.update_resources(linears[linear], rank, "bf16", gpu)

        todo += [compilation("update", f"{linear} rank {rank}", gpu, update) for gpu in GPUS]
    todo += [compilation(kernel, "", gpu, measure) for kernel, measure in others.items() for gpu in GPUS]
    return todo


def render(used: Sequence[Used]) -> Table:
    """One line a kernel and shape."""
    gpus = list(dict.fromkeys(one.gpu for one in used))
    table = Table("kernel", "shape", *gpus, title="registers / spilled bytes / shared KiB / bytes of the widest load")
    cells = {
        (u.kernel, u.shape, u.gpu): f"{u.registers} / {u.spilled_bytes} / {u.shared_kib:.0f} / {u.widest_load}"
        for u in used
    }
    for kernel, shape in dict.fromkeys((one.kernel, one.shape) for one in used):
        table.add_row(kernel, shape, *(cells[kernel, shape, gpu] for gpu in gpus))
    return table


def write_results(used: Sequence[Used], output: Path) -> None:
    """`kernel_resources.csv` and `kernel_resources.png` in a folder: registers and shared memory, a bar a GPU."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    with (output / "kernel_resources.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("kernel", "shape", "gpu", "registers", "spilled_bytes", "shared_bytes", "widest_load"))
        writer.writerows(dataclasses.astuple(one) for one in used)
    names, gpus = list(dict.fromkeys(one.name for one in used)), list(dict.fromkeys(one.gpu for one in used))
    figure, (registers, shared) = pyplot.subplots(1, 2, sharey=True, figsize=(12, 2 + 0.3 * len(names)))
    height = 0.8 / len(gpus)
    for i, gpu in enumerate(gpus):
        of_gpu = [one for one in used if one.gpu == gpu]
        places = [names.index(one.name) + (i - (len(gpus) - 1) / 2) * height for one in of_gpu]
        registers.barh(places, [one.registers for one in of_gpu], height, label=gpu)
        shared.barh(places, [one.shared_kib for one in of_gpu], height, label=gpu)
    spilled = sum(one.spilled_bytes > 0 for one in used)
    registers.set(
        yticks=range(len(names)),
        yticklabels=names,
        xlabel="registers a thread",
        title=f"{spilled} of {len(used)} spill",
    )
    shared.set(xlabel="KiB of shared memory a program")
    registers.invert_yaxis()
    shared.legend()
    figure.tight_layout()
    figure.savefig(output / "kernel_resources.png", dpi=150)
    pyplot.close(figure)
