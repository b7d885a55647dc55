"""What is known of one model file or folder on this PC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Family = Literal["sd15", "sdxl"]
Tool = Literal[
    "ComfyUI",
    "A1111/Forge",
    "InvokeAI",
    "SwarmUI",
    "Stability Matrix",
    "kohya_ss",
    "OneTrainer",
    "Hugging Face",
    "Impasto",
    "your folders",
]
"""Whose folder a model lies in."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a base's header or configs tell; `problem` says in words why it is none that can be trained on, else ""."""

    family: Family | None
    velocity: bool | None = None
    """Whether it predicts the velocity (v) instead of the noise; None: nothing decides it."""
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A base on this PC, left where it lies: a .safetensors file, or a diffusers folder."""

    path: Path
    tool: Tool
    bytes: int
    told: Told
    hub: str = ""
    """Its Hugging Face id where it lies in that cache."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder where a tool looks for LoRAs."""

    kind: Tool
    folder: Path
