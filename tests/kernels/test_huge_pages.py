"""HugePages against Linux' own report of the memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multilora_kernels import HugePages
from multilora_kernels.huge_pages import are_switched_off, populate

SLAB_BYTES = 1 << 26


def mapping_of(address: int) -> str | None:
    """What /proc/self/smaps says of the mapping that an address lies in."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    for mapping in filter(None, mappings):
        begin, end = (int(address, 16) for address in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return mapping
    return None


def test_linux_is_asked_for_huge_pages_and_one_begins_where_the_memory_does():
    tensor = HugePages().zeros((3, 5), torch.bfloat16)
    assert tensor.data_ptr() % (2 << 20) == 0
    assert re.search(r"^VmFlags:.* hg( |$)", mapping_of(tensor.data_ptr()) or "", re.MULTILINE)


@given(sizes=st.lists(st.integers(0, SLAB_BYTES // 3) | st.integers(0, 200), max_size=8), dtype=st.sampled_from([4, 2]))
def test_tensors_are_zero_have_a_cache_line_of_their_own_and_lie_in_order(sizes, dtype):
    pages = HugePages()
    tensors = [pages.zeros((size // dtype,), {4: torch.float32, 2: torch.float16}[dtype]) for size in sizes]
    for number, tensor in enumerate(tensors, 1):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor[:100].any()
        assert not tensor[-100:].any()
        tensor[:100] = number
        tensor[-100:] = number
    for number, tensor in enumerate(tensors, 1):
        assert tensor[:100].eq(number).all()
        assert tensor[-100:].eq(number).all()


def test_small_ones_follow_each_other_and_one_larger_than_a_slab_is_whole():
    pages = HugePages()
    first, second = pages.zeros((7, 3), torch.float32), pages.zeros((64,), torch.float32)
    assert second.data_ptr() - first.data_ptr() == 128
    large = pages.zeros((SLAB_BYTES // 4 + 1,), torch.float32)
    large[-1] = 1
    assert large.numel() == SLAB_BYTES // 4 + 1
    assert not second.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_their_memory_outlives_the_pages_object_and_ends_with_the_last_tensor(dtype):
    pages = HugePages()
    tensor, other = pages.zeros((1 << 20,), dtype), pages.zeros((5,), dtype)
    address = tensor.data_ptr()
    del pages, tensor
    other += 1
    assert other.eq(1).all()
    assert mapping_of(address)
    del other
    assert not mapping_of(address)


@pytest.mark.parametrize(
    ("text", "is_off"), [("always madvise [never]\n", True), ("always [madvise] never\n", False), (None, False)]
)
def test_whether_linux_gives_them_to_nobody_is_what_its_setting_says(tmp_path, text, is_off):
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    assert are_switched_off(setting) == is_off


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of the mapping that a tensor lies in."""
    match = re.search(r"^Rss: +(\d+) kB", mapping_of(tensor.data_ptr()) or "", re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def test_memory_that_is_populated_is_taken_and_keeps_its_values():
    tensor = HugePages().zeros((SLAB_BYTES // 4,), torch.float32)
    before = resident_bytes(tensor)
    tensor[5] = 3.0
    assert populate(tensor[: len(tensor) // 2])
    taken = resident_bytes(tensor) - before
    assert tensor.nbytes // 2 <= taken <= tensor.nbytes // 2 + (4 << 20)
    assert tensor[:8].tolist() == [0, 0, 0, 0, 0, 3, 0, 0]


def test_memory_that_is_lacking_is_told_with_its_size():
    code = """
import resource
from multilora_kernels.huge_pages import HugePages
import torch
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
try:
    HugePages().zeros((64 << 30,), torch.uint8)
except MemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.match(r"65536 MiB for weights, KV cache or adapters: Cannot allocate memory; .*ulimit -v", done.stdout)
