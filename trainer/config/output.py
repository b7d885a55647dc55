"""Where the result goes and in which forms."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.config.model import Section


class OutputConfig(Section):
    """Where the LoRA goes and in which forms."""

    runs: str = "runs"
    """The folder that holds the run directories, relative to the job file."""
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    """The number format of the LoRA file; fp16 loads everywhere."""
    diffusers: bool = False
    """Whether a second file in diffusers naming is written as well."""
    author: str = ""
    """Your name, for the file's metadata."""
    licence: str = ""
    """The licence of the LoRA, for the file's metadata."""
    description: str = ""
    """What the LoRA does, for the file's metadata."""
    tag_frequency: bool = Field(default=False)
    """Whether the file tells how often each tag was trained; it reveals your captions."""
