"""Turns the files of a dropped adapter into wire tensors, in a process of its own that ends with its time.

A PEFT configuration has regular expressions, which can take for ever, and its file can ask for much memory: neither may
stop the console. As a program: `python -m multilora_client.console.converting IN OUT [BASE_MODEL]` writes the files of
the wire format into OUT, and to standard output a line of JSON for each piece of progress, or for its failure.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import numpy as np

from multilora_client.adapter import AdapterTensors, is_converted
from multilora_client.convert import convert_peft, load_adapter_tensors
from multilora_client.errors import AdapterError, MultiloraClientError, TimedOut
from multilora_client.peft_directory import PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE, is_peft
from multilora_wire.converted_files import CONFIG_FILE, OLD_CONFIG_FILE, ORIGIN_FILE, WEIGHTS_FILE
from multilora_wire.end_with_parent import end_with_parent

FILE_NAMES = frozenset({PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE, WEIGHTS_FILE, CONFIG_FILE, OLD_CONFIG_FILE, ORIGIN_FILE})
"""The only files of an adapter that are read, and so the only ones that are taken."""


async def converted(
    directory: Path, output: Path, base_model: Path | None, max_seconds: float
) -> AsyncGenerator[tuple[int, int], None]:
    """Convert the adapter in `directory` into `output`, telling (rows done, rows in all).

    Raises AdapterError, TimedOut. To leave it early, do so under `contextlib.aclosing`, which ends the process.
    """
    arguments = [str(directory), str(output), *([] if base_model is None else [str(base_model)])]
    process = await asyncio.create_subprocess_exec(
        *end_with_parent([sys.executable, "-m", __name__, *arguments]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(max_seconds):
            async for text in process.stdout:
                report = json.loads(text)
                if "error" in report:
                    raise AdapterError(report["error"])
                yield report["done"], report["total"]
            if await process.wait():
                raise AdapterError("the adapter's files cannot be read: the process that reads them has died")
    except TimeoutError:
        raise TimedOut(f"the adapter's files were not read within {max_seconds:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def main(directory: Path, output: Path, base_model: Path | None) -> None:
    try:
        _check_arrays(directory)
        _read(directory, base_model).save(output)
    except MemoryError:
        _say(error="the adapter's files do not fit into memory")
    except MultiloraClientError as error:
        _say(error=str(error).replace(f"{directory}/", ""))


def _read(directory: Path, base_model: Path | None) -> AdapterTensors:
    if is_peft(directory) and not is_converted(directory):  # with both, it is refused below
        return convert_peft(
            directory, on_progress=lambda done, total: _say(done=done, total=total), base_model=base_model
        )
    return load_adapter_tensors(directory)


def _check_arrays(directory: Path) -> None:
    """Raises AdapterError for an array that says to be larger than its file, before anything makes room for it."""
    for path in directory.glob("*.npy"):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise AdapterError(f"{path.name} is not a readable .npy array without pickled objects: {error}") from None


def _say(**report: str | int) -> None:
    print(json.dumps(report), flush=True)  # noqa: T201


if __name__ == "__main__":
    given, wanted, *rest = map(Path, sys.argv[1:])
    main(given, wanted, rest[0] if rest else None)
