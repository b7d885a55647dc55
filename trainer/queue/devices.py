"""Which lanes this machine has, and which of them an entry of the queue can go on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainer import gpu
from trainer.errors import ImpastoError
from trainer.protocol.queue import Entry
from trainer.protocol.reading import parse_toml, read_text
from trainer.protocol.run_directory import RunDirectory


def machine_lanes() -> list[str]:
    """Return "cuda:0", "cuda:1" ... for the NVIDIA cards, as PyTorch numbers them; "cpu" where there is none."""
    try:
        count = len(gpu.cards())
    except ImpastoError:  # training says it in words, and goes on with the CPU
        count = 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        count = min(count, len([one for one in chosen.split(",") if one.strip() and not one.strip().startswith("-")]))
    return [f"cuda:{index}" for index in range(count)] or ["cpu"]


def lanes_for(entry: Entry, lanes: Sequence[str]) -> list[str]:
    """Return the lanes that an entry can go on: the one that its job names, else any."""
    device = _device(entry)
    return [device] if device is not None and device in ("cpu", *lanes) else list(lanes)


def settings_for(entry: Entry, lane: str, lanes: Sequence[str]) -> list[str]:
    """Return the words for `train` that lead a job to its lane, where the machine has several and it names none."""
    return ["--set", f"fit.device={lane}"] if len(lanes) > 1 and _device(entry) is None else []


def _device(entry: Entry) -> str | None:
    """Return the device that a job or run names: "cpu", "cuda:1"; None where it leaves the choice open."""
    try:
        device = parse_toml(_job_text(entry))["fit"]["device"]
    except (OSError, ValueError, KeyError, TypeError):  # training says what is wrong with the file
        return None
    return None if device == "cuda" else str(device)


def _job_text(entry: Entry) -> str:
    """Return the job of a run, or the frozen one that is to become a run; raises OSError and UnusableFileError."""
    if entry.run is None and entry.text is not None:
        return entry.text
    path = RunDirectory(entry.run).job if entry.run else entry.job
    assert path is not None
    return read_text(path, "text")
