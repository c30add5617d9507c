"""The order of the codes of a weight that is stored for GPUs.

Tensor cores take their left side from registers in tiles of 16 inputs. A thread holds two neighbours from each half of
a tile, for two outputs. In this order, the codes that one thread needs of a larger tile lie side by side. So a thread
fetches 16 bytes at once, and the codes become registers of two floats without being sorted. In the order of the inputs,
a thread would fetch single bytes: the linears of a layer of 8B in int4 took 150 us for 64 rows on an H200, against 97.
"""

from __future__ import annotations

import torch

_LARGEST_TILE, _LEAST_TILE = 128, 32


def tile_inputs(group_size: int, in_features: int) -> int:
    """The number of inputs in a tile: 32, 64 or 128, so that no tile spans two groups. 0 if no such tile fits.

    Codes are padded to whole tiles. Without tiles, codes lie in the order of the inputs.
    """
    if group_size >= in_features:
        return _LARGEST_TILE
    largest = min(_LARGEST_TILE, group_size & -group_size)
    return largest if largest >= _LEAST_TILE else 0


def in_tiles(codes: torch.Tensor, tile: int, bits: int) -> torch.Tensor:
    """codes: [n, in_features], in the order of the inputs. Returns [n, whole tiles], as they are stored.

    Input 16 s + 8 h + 2 a + e of a tile, of a < 4, e < 2 and h < 2, is stored by (a, s, h, e), and where two codes of 4
    bits share a byte by (a, s, e, h): they are from both halves.
    """
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % tile))
    halves = padded.view(len(codes), -1, tile // 16, 2, 4, 2)
    return halves.permute(0, 1, 4, 2, *((5, 3) if bits == 4 else (3, 5))).flatten(1)


def in_order(codes: torch.Tensor, tile: int, bits: int) -> torch.Tensor:
    """The inverse of `in_tiles`, with its padding."""
    shape = (len(codes), -1, 4, tile // 16, 2, 2)
    return codes.view(shape).permute(0, 1, 3, *((5, 2, 4) if bits == 4 else (4, 2, 5))).flatten(1)
