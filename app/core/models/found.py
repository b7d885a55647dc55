"""What is known of one model file or folder on this PC."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.protocol.fields import json_keys

Family = Literal["sd15", "sdxl"]
Tool = Literal[
    "ComfyUI",
    "Fooocus",
    "A1111/Forge",
    "InvokeAI",
    "SwarmUI",
    "Stability Matrix",
    "kohya_ss",
    "OneTrainer",
    "Hugging Face",
    "Impasto",
    "",
]
"""Whose folder a model lies in; "" for a folder that the user named."""


@json_keys("family", "velocity", "problem", "remedy")
@dataclass(frozen=True, slots=True)
class Told:
    """What a base's header or configs tell; `problem` says in words why it is none that can be trained on, else ""."""

    family: Family | None = None
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
    name: str
    """What people call it: the file's stem, the folder's name, or the Hub id."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder that a tool loads LoRAs from. `kind` is the tool's name, "" for a folder that the user chose."""

    kind: Tool
    folder: Path
