"""Record PyTorch's memory history and save it as a snapshot for PyTorch's viewer, pytorch.org/memory_viz.

The allocator keeps its latest events in a ring buffer. A snapshot contains these events and all memory that is reserved
when it is taken. The phases of the run are recorded as annotations, which the viewer does not show; a saved snapshot
therefore also has the phase as each event's category, which the viewer uses as the color.
"""

from __future__ import annotations

import pickle
import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import trainer
from trainer.protocol import files
from trainer.protocol.forecast import PHASES, ForecastPhase
from trainer.protocol.reading import reason_of
from trainer.protocol.run_directory import MemorySnapshot, RunDirectory
from trainer.protocol.text import size
from trainer.training.reporting.reporter import Reporter

MAX_EVENTS = 200_000
"""Number of allocator events to keep, each with its Python stack; about six micro-batches of SDXL.

They make a file of 20 MB. Recording them takes about 100 MB of main memory, and saving them 400 MB for some seconds.
"""
PICKLE_PROTOCOL = 4  # the viewer reads no later one, which Python 3.14 uses by default
OUTSIDE = "unknown"
"""Category of events outside of all phases. The viewer fails if there are categories, but not this one."""
_VIEWER = "pytorch.org/memory_viz"


class MemoryHistory:
    """Recording of the GPU memory events of one attempt."""

    def __init__(self, run: RunDirectory, reporter: Reporter) -> None:
        self._run = run
        self._reporter = reporter
        self._mark: torch.autograd.profiler.record_function | None = None
        # Stacks of Python only: those of C++ take much longer to record, and need symbols to read.
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, clear_history=True
        )

    def enter(self, phase: ForecastPhase | None) -> None:
        """Mark the beginning of a phase, which ends the previous one; None only ends it."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
        self._mark = None if phase is None else torch.autograd.profiler.record_function(phase)
        if self._mark is not None:
            self._mark.__enter__()  # type: ignore[no-untyped-call]

    def save(self, name: MemorySnapshot) -> None:
        """Write a snapshot to the run's folder; report its file, or why it could not be written."""
        file = self._run.memory_snapshot(name)
        try:
            snapshot = without_paths(with_categories(torch.cuda.memory._snapshot()))
            with files.staged(file, durable=False) as temporary, temporary.open("wb") as stream:
                pickle.dump(snapshot, stream, protocol=PICKLE_PROTOCOL)
            sentence = f"Wrote the memory snapshot {file.name} ({size(file.stat().st_size)}). Open it at {_VIEWER}."
        except OSError as error:  # neither a full disk nor full memory must end the run or hide its own error
            sentence = f"Could not write the memory snapshot {file.name}: {reason_of(error)}."
        except (MemoryError, RuntimeError) as error:
            reason = str(error).partition("\n")[0] or "there is not enough main memory"
            sentence = f"Could not write the memory snapshot {file.name}: {reason}."
        self._reporter.notice("memory.snapshot", sentence)

    def close(self) -> None:
        """Save the last snapshot and stop recording."""
        self.enter(None)
        self.save("end")
        torch.cuda.memory._record_memory_history(None)


def start_history(run: RunDirectory, device: torch.device, reporter: Reporter) -> MemoryHistory | None:
    """Start recording on a GPU; elsewhere, report that there is nothing to record and return None."""
    if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native":
        return MemoryHistory(run, reporter)
    reason = "it trains on the CPU" if device.type == "cpu" else "PyTorch's own GPU allocator is not in use"
    reporter.notice(
        "memory.snapshot",
        f"This run writes no memory snapshot, because {reason}: PyTorch records only the GPU memory that its own "
        "allocator manages.",
    )
    return None


def with_categories(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot in which the category of each event is the phase during which it happened."""
    marks = list(_phases(snapshot.get("external_annotations", ())))
    times = [time for time, _ in marks]
    for events in snapshot["device_traces"]:
        for event in events:
            place = bisect_right(times, event["time_us"])
            event["category"] = marks[place - 1][1] if place else OUTSIDE
        if events and all(event["category"] != OUTSIDE for event in events):
            events[0]["category"] = OUTSIDE
    return snapshot


def _phases(annotations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yield the time of each phase's beginning, in microseconds, with its name; also for the time after the last."""
    phases = [mark for mark in annotations if mark["name"] in PHASES]
    for mark in phases:
        yield mark["time_us"], mark["name"] if mark["stage"] == "START" else OUTSIDE


def without_paths(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot whose stacks name files relative to the package folder; other files keep only their name.

    Equal stacks become one list, which is pickled once.
    """
    roots = _package_folders()
    stacks: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    frames: dict[int, dict[str, Any]] = {}
    for holder in _with_stacks(snapshot):
        found = holder["frames"]
        for frame in found:
            if id(frame) not in frames:
                frames[id(frame)] = frame
                frame["filename"] = relative_file(frame["filename"], roots)
        holder["frames"] = stacks.setdefault(tuple(map(id, found)), found)
    return snapshot


def _with_stacks(snapshot: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every segment, block and event that has a stack."""
    blocks = (block for segment in snapshot["segments"] for block in segment["blocks"])
    events = (event for events in snapshot["device_traces"] for event in events)
    for holders in (snapshot["segments"], blocks, events):
        yield from (holder for holder in holders if "frames" in holder)


def relative_file(file: str, roots: Sequence[str]) -> str:
    """Return a source file's path relative to the first of the folders that contains it, else only its name."""
    plain = file.replace("\\", "/")
    for root in roots:
        if plain.startswith(root):
            return plain.removeprefix(root)
    return plain.rpartition("/")[2]


def _package_folders() -> tuple[str, ...]:
    """Return the folders of Python's library, installed packages and this program, each ending in "/"; inner first."""
    paths = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")]
    paths += [Path(package).parent for package in trainer.__path__]
    paths += [Path(folder) for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]  # of the user
    plain = {path.absolute().as_posix() + "/" for path in paths}
    return tuple(sorted(plain, key=len, reverse=True))
