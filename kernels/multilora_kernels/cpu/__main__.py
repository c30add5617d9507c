"""Build the CPU operators ahead of time: `python -m multilora_kernels.cpu`."""

from __future__ import annotations

import logging

from multilora_kernels.cpu.build import load_library

logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.info("CPU kernels: %s", load_library().__file__)
