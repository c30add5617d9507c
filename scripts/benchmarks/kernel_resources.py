"""The resources of the GPU kernels, compiled here for GPUs that are not there: a table, a CSV and a plot.

`bench_kernels --aot --docs` writes the table of docs/gpu.md, too, where the linears of a model share a row.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.lora_workloads import Model
from benchmarks.model_shapes import BLOCK_SIZE, VOCAB_SIZE
from multilora_kernels.segments import CHUNK_SIZE, PREFILL_CHUNK_SIZE

GPUS = (80, 86, 89, 90, 100, 120)
"""Compute capabilities: sm_80 and so on."""

_HEAD_DIM, _GROUP = 128, 4
"""The sizes of the attention of a model with 8 billion parameters."""

_HEADS = ((_HEAD_DIM, "bf16", False), (_HEAD_DIM, "bf16", True), (_HEAD_DIM, "fp32", False), (64, "bf16", False))
"""Size, type of queries, and whether the cache is of int8."""


@dataclass(frozen=True)
class Used:
    """The resources of one kernel on one GPU generation.

    linear: of the model, empty where the kernel has none. shape: of adapters, heads or rows.
    """

    kernel: str
    linear: str
    shape: str
    gpu: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    widest_load: int

    @property
    def name(self) -> str:
        """Kernel, linear and shape."""
        return " ".join(filter(None, (self.kernel, self.linear, self.shape)))

    @property
    def shared_kib(self) -> float:
        return self.shared_bytes / 1024


def compilations(model: Model) -> list[Callable[[], Used]]:
    """One for each kernel, shape and GPU generation; each compiles when called."""
    # Imported here: Triton comes with the CUDA builds of torch only.
    from benchmarks import compiled_kernels

    def compilation(
        kernel: str, linear: str, shape: str, gpu: int, resources: Callable[[int], compiled_kernels.Resources]
    ) -> Callable[[], Used]:
        def run() -> Used:
            used = resources(gpu)
            sizes = (used.registers, used.spilled_bytes, used.shared_bytes, used.widest_load)
            return Used(kernel, linear, shape, f"sm_{gpu}", *sizes)

        return run

    linears = dict(zip(("q|k|v", "o", "gate|up", "down"), model.linears, strict=True))
    halves = {"shrink": compiled_kernels.shrink_resources, "expand": compiled_kernels.expand_resources}
    hidden = model.linears[0].in_features
    attention = {
        "decode attention": compiled_kernels.decode_resources,
        "prompt attention": compiled_kernels.prompt_resources,
    }
    others: dict[tuple[str, str], Callable[[int], compiled_kernels.Resources]] = {
        ("rotation", "heads of 128"): lambda gpu: compiled_kernels.rotation_resources(_HEAD_DIM, "bf16", gpu),
        ("segments", "64 tokens"): lambda gpu: compiled_kernels.segment_resources(64, gpu),
        ("add_rms_norm", f"rows of {hidden:,}"): lambda gpu: compiled_kernels.add_rms_norm_resources(
            hidden, "bf16", gpu
        ),
        ("silu_mul", ""): lambda gpu: compiled_kernels.silu_mul_resources("bf16", gpu),
        ("sample_tokens", f"{VOCAB_SIZE:,} tokens"): lambda gpu: compiled_kernels.sample_resources(VOCAB_SIZE, gpu),
        ("penalise_tokens", ""): compiled_kernels.penalise_resources,
        ("forbid_tokens", ""): compiled_kernels.forbid_resources,
        ("fill_step_inputs", ""): compiled_kernels.fill_resources,
        ("linear of int4 codes", "16 rows"): lambda gpu: compiled_kernels.multiply_codes_resources(
            "int4", 16, False, "bf16", gpu
        ),
        ("linear of int4 codes", "64 rows"): lambda gpu: compiled_kernels.multiply_codes_resources(
            "int4", 64, False, "bf16", gpu
        ),
        ("linear of int8 codes", "64 rows"): lambda gpu: compiled_kernels.multiply_codes_resources(
            "int8", 64, False, "bf16", gpu
        ),
        ("linear of fp8 codes", "64 rows"): lambda gpu: compiled_kernels.multiply_codes_resources(
            "fp8", 64, False, "bf16", gpu
        ),
        ("int4 codes to floats", ""): lambda gpu: compiled_kernels.dequantize_resources("int4", False, "bf16", gpu),
    }
    todo = []
    for half, linear, rank, chunk in itertools.product(halves, linears, (16, 64), (CHUNK_SIZE, PREFILL_CHUNK_SIZE)):

        def resources(
            gpu: int, half: str = half, linear: str = linear, rank: int = rank, chunk: int = chunk
        ) -> compiled_kernels.Resources:
            return halves[half](linears[linear], chunk, rank, "bf16", gpu)

        todo += [compilation(half, linear, f"rank {rank}, chunks of {chunk}", gpu, resources) for gpu in GPUS]
    for linear, rank in itertools.product(linears, (16, 64)):

        def update(gpu: int, linear: str = linear, rank: int = rank) -> compiled_kernels.Resources:
            return compiled_kernels.update_resources(linears[linear], rank, "bf16", gpu)

        todo += [compilation("update", linear, f"rank {rank}", gpu, update) for gpu in GPUS]
    for (kernel, measured), (head_dim, dtype, codes) in itertools.product(attention.items(), _HEADS):

        def attend(
            gpu: int,
            measured: Callable[..., compiled_kernels.Resources] = measured,
            head_dim: int = head_dim,
            dtype: str = dtype,
            codes: bool = codes,
        ) -> compiled_kernels.Resources:
            return measured(_GROUP, head_dim, BLOCK_SIZE, dtype, gpu, has_codes=codes)

        shape = f"heads of {head_dim}, {dtype}{', int8 cache' if codes else ''}"
        todo += [compilation(kernel, "", shape, gpu, attend) for gpu in GPUS]
    todo += [
        compilation(kernel, "", shape, gpu, measure) for (kernel, shape), measure in others.items() for gpu in GPUS
    ]
    return todo


def render(used: Sequence[Used]) -> Table:
    """One line a kernel, linear and shape."""
    gpus = list(dict.fromkeys(one.gpu for one in used))
    table = Table("kernel", *gpus, title="registers / spilled bytes / shared KiB / bytes of the widest load")
    cells = {(one.name, one.gpu): _cell([one]) for one in used}
    for name in dict.fromkeys(one.name for one in used):
        table.add_row(name, *(cells[name, gpu] for gpu in gpus))
    return table


def docs_table(used: Sequence[Used]) -> str:
    """The table of docs/gpu.md: one line a kernel and shape, over all linears of the model."""
    gpus = list(dict.fromkeys(one.gpu for one in used))
    lines = [f"| kernel | {' | '.join(gpus)} |", f"| --- |{' ---: |' * len(gpus)}"]
    for kernel, shape in dict.fromkeys((one.kernel, one.shape) for one in used):
        of_row = [one for one in used if (one.kernel, one.shape) == (kernel, shape)]
        cells = [_cell([one for one in of_row if one.gpu == gpu]) for gpu in gpus]
        lines.append(f"| {', '.join(filter(None, (kernel, shape)))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(used: Sequence[Used]) -> str:
    """The most of each resource, and the widest load of the kernel that has the narrowest one."""
    registers, spilled, shared = (
        max(values)
        for values in zip(*((one.registers, one.spilled_bytes, one.shared_kib) for one in used), strict=True)
    )
    return f"{registers} / {spilled} / {shared:.0f} / {min(one.widest_load for one in used)}"


def write_results(used: Sequence[Used], output: Path) -> None:
    """`kernel_resources.csv` and `kernel_resources.png` in a folder: registers and shared memory, a bar a GPU."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    with (output / "kernel_resources.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("kernel", "linear", "shape", "gpu", "registers", "spilled_bytes", "shared_bytes", "widest_load")
        )
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
