"""Which tests need a GPU."""

from __future__ import annotations

import torch

collect_ignore = [] if torch.cuda.is_available() else ["test_gpu.py"]
