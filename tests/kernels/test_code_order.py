"""The order of codes that are stored for GPUs, against where the instructions of tensor cores want them."""

from __future__ import annotations

import pytest
import torch

from multilora_kernels.code_order import in_order, in_tiles, tile_inputs


@pytest.mark.parametrize(
    ("group_size", "in_features", "tile"),
    [(128, 4096, 128), (64, 4096, 64), (96, 960, 32), (256, 4096, 128), (40, 400, 0), (16, 64, 0), (90, 90, 128)],
)
def test_tiles_divide_groups(group_size, in_features, tile):
    assert tile_inputs(group_size, in_features) == tile


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tile", [32, 64, 128])
def test_a_thread_finds_its_inputs_side_by_side(tile, bits):
    stored = in_tiles(torch.arange(2 * tile).expand(3, -1), tile, bits)
    assert stored.shape == (3, 2 * tile)
    of_thread = tile // 4
    for first in (0, tile):
        for thread in range(4):
            # mma.m16n8k16 and wgmma: thread t of four holds inputs 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of sixteen.
            wanted = {first + 16 * s + 2 * thread + i for s in range(tile // 16) for i in (0, 1, 8, 9)}
            begin = first + thread * of_thread
            own = stored[1, begin : begin + of_thread]
            assert set(own.tolist()) == wanted
            # Two codes that become one register are neighbours; those of 4 bits are of bytes side by side.
            pairs = own.view(-1, 2, 2).transpose(1, 2).flatten(0, 1) if bits == 4 else own.view(-1, 2)
            assert (pairs[:, 1] - pairs[:, 0]).unique().tolist() == [1]
            assert (pairs[:, 0] % 2).unique().tolist() == [0]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_order_of_the_inputs_comes_back_with_zeros_after_it(bits):
    codes = torch.randint(1, 256, (5, 150), dtype=torch.uint8)
    restored = in_order(in_tiles(codes, 64, bits), 64, bits)
    assert torch.equal(restored, torch.nn.functional.pad(codes, (0, 42)))
