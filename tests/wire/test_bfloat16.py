"""Against torch's bfloat16."""

import numpy as np
import torch

from multilora_wire.bfloat16 import bfloat16_to_float32, float32_to_bfloat16


def test_rounding_is_that_of_torch_ties_subnormals_and_overflow_included() -> None:
    random = np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0x00008000, 0x7F7FFFFF], np.uint32).view(np.float32)
    values = np.concatenate([random[~np.isnan(random)], ties, np.float32([0.0, -0.0, np.inf, -np.inf])])

    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()

    np.testing.assert_array_equal(float32_to_bfloat16(values), expected)


def test_every_bfloat16_survives_the_way_to_float32_and_back() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = bits[~np.isnan(bfloat16_to_float32(bits))]

    np.testing.assert_array_equal(float32_to_bfloat16(bfloat16_to_float32(numbers)), numbers)
