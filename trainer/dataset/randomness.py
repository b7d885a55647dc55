"""All chance of a run: one independent stream of numbers for each (seed, purpose, epoch, sample, repeat)."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

import numpy as np

Purpose = Literal[
    "order",
    "crop",
    "flip",
    "caption",
    "posterior",
    "timestep",
    "noise",
    "perturbation",
    "adapter",
    "preview",
    "validation",
]


def generator(seed: int, purpose: Purpose, *, epoch: int = 0, sample: str = "", repeat: int = 0) -> np.random.Generator:
    """Return a fresh stream that depends on nothing but the arguments, on every machine alike.

    The 128-bit Philox key is the head of the SHA-256 of the arguments as a JSON list: streams of different
    arguments are independent, so no stream's position ever has to be saved or restored.
    """
    packed = json.dumps([seed, purpose, epoch, sample, repeat]).encode("ascii")
    key = int.from_bytes(hashlib.sha256(packed).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key))
