"""The number formats a job may name, as torch dtypes."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
