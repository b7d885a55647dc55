"""The closed set of events that a run writes, one JSON line each, and how they are read back.

An event carries codes and numbers; whoever shows it finds the words. Error and notice events carry their sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

from trainer.protocol import files
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.reading import open_file, parse_json
from trainer.protocol.records import build, json_keys, to_record

Phase = Literal["download", "load", "check", "cache_pictures", "cache_texts", "train", "preview", "validate", "save"]
Outcome = Literal["done", "paused", "stopped", "failed"]

_LONGEST_LINE = 1 << 24  # bytes; a line of another program could otherwise fill the memory

MOST_TIMED = 1e6
"""Things a second: what seems quicker took no time that a clock can tell."""

OnPhase = Callable[[Phase, int, int], None]
"""Called with a phase, how much of it is done, and how much there is in all."""


@json_keys("time", "attempt")
@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events share; the writer fills both fields in."""

    type: ClassVar[str]
    time: float = 0.0
    """Unix time in seconds."""
    attempt: int = 0
    """The number of the start that wrote it, from 1."""


@json_keys("pid", "device", "step_seconds")
@dataclass(frozen=True)
class AttemptStarted(Event):
    """A start of the engine; `device` as in the job, such as "cpu" or "cuda:0"."""

    type: ClassVar[str] = "attempt_started"
    pid: int
    device: str
    step_seconds: float | None = None
    """What a step was forecast to take; None without a forecast."""


@json_keys("phase", "total")
@dataclass(frozen=True)
class PhaseStarted(Event):
    """A phase begins; `total` counts its units (bytes, files, pictures, texts, steps), None when unknown."""

    type: ClassVar[str] = "phase_started"
    phase: Phase
    total: int | None


@json_keys("phase", "done", "total")
@dataclass(frozen=True)
class PhaseProgress(Event):
    """How far a phase is, in the units of its total."""

    type: ClassVar[str] = "phase_progress"
    phase: Phase
    done: int
    total: int | None


@json_keys("phase", "seconds")
@dataclass(frozen=True)
class PhaseFinished(Event):
    """A phase has ended after so many seconds."""

    type: ClassVar[str] = "phase_finished"
    phase: Phase
    seconds: float


@json_keys("phase", "count", "seconds", "decode", "encode", "write")
@dataclass(frozen=True)
class CachingSpeed(Event):
    """Pictures or texts were encoded and written, all stages at once; how fast, and how fast each could have been."""

    type: ClassVar[str] = "cached"
    phase: Literal["cache_pictures", "cache_texts"]
    count: int
    seconds: float
    decode: float | None
    """A second, if decoding waited for nothing else; None for texts."""
    encode: float
    """The same of the VAE or the text encoders."""
    write: float
    """The same of the disk."""

    @property
    def rate(self) -> float:
        """Things a second, all stages together."""
        return self.count / max(self.seconds, 1e-3)

    @property
    def limits(self) -> dict[str, float]:
        """What each stage (decode, encode, write) could have done by itself, a second, where that could be measured."""
        stages = {"decode": self.decode, "encode": self.encode, "write": self.write}
        return {name: limit for name, limit in stages.items() if limit and limit < MOST_TIMED}


@json_keys(
    "step", "epoch", "loss", "grad_norm", "learning_rates", "pictures", "seconds", "skipped", "loss_scale", "memory",
)  # fmt: skip
@dataclass(frozen=True)
class StepEvent(Event):
    """One optimizer step. Numbers that are not finite are None, since JSON has no word for them."""

    type: ClassVar[str] = "step"
    step: int
    """From 1."""
    epoch: int
    loss: float | None
    grad_norm: float | None
    """Before clipping."""
    learning_rates: Mapping[str, float]
    """By part: unet, text_encoder, text_encoder_2."""
    pictures: int
    """How many pictures the step learned from."""
    seconds: float
    skipped: bool = False
    """Whether the optimizer stayed where it was because something was not finite."""
    loss_scale: float | None = None
    """fp16 only."""
    memory: int | None = None
    """Bytes held on the training device, at the peak since the last step; None where that is not known."""


@json_keys("step", "loss", "held_out", "per_timestep")
@dataclass(frozen=True)
class Validation(Event):
    """Loss at fixed noise; `held_out` tells whether on pictures that are not trained on."""

    type: ClassVar[str] = "validation"
    step: int
    loss: float | None
    held_out: bool
    per_timestep: Mapping[str, float | None]
    """By timestep, written as text because JSON has only such keys."""


@json_keys("step", "index", "file", "seconds")
@dataclass(frozen=True)
class Preview(Event):
    """A picture was drawn; `file` is relative to the run directory, `index` the number of its prompt from 0."""

    type: ClassVar[str] = "preview"
    step: int
    index: int
    file: str
    seconds: float


@json_keys("step", "file", "sha256")
@dataclass(frozen=True)
class Saved(Event):
    """A LoRA file was written and checked; `file` is relative to the run directory."""

    type: ClassVar[str] = "saved"
    step: int
    file: str
    sha256: str


@json_keys("step", "folder")
@dataclass(frozen=True)
class CheckpointEvent(Event):
    """A resumable checkpoint is complete; `folder` is its name in checkpoints/."""

    type: ClassVar[str] = "checkpoint"
    step: int
    folder: str


@json_keys("step", "reason")
@dataclass(frozen=True)
class Skipped(Event):
    """A step changed nothing; `reason` is a code such as "loss", "gradient" or "scale"."""

    type: ClassVar[str] = "skipped"
    step: int
    reason: str


@json_keys("name", "outcome", "detail")
@dataclass(frozen=True)
class CommandEvent(Event):
    """A command was carried out or not; `outcome` as in `commands.CommandOutcome`."""

    type: ClassVar[str] = "command"
    name: str
    outcome: str
    detail: str


@json_keys("code", "sentence")
@dataclass(frozen=True)
class Notice(Event):
    """Something that the user should know and that stops nothing."""

    type: ClassVar[str] = "notice"
    code: str
    sentence: str


@json_keys("phase", "step", "requested", "stage", "module", "allocated", "reserved", "forecast")
@dataclass(frozen=True)
class MemoryExhausted(Event):
    """Memory ran out; what follows says how the run went on. What is not known is None or empty."""

    type: ClassVar[str] = "memory_exhausted"
    phase: ForecastPhase
    step: int
    """How many optimizer steps were done."""
    requested: int | None
    """Bytes that were asked for and not given."""
    stage: str
    """What a step was doing: "forward", "backward", "accumulate", "measure", "clip", "optimizer" or "refresh"."""
    module: str
    """Where in the model, such as "unet.up_blocks.1.attentions.0"."""
    allocated: int | None
    """Bytes in use on the card at that moment."""
    reserved: int | None
    """Bytes that PyTorch had taken from the driver."""
    forecast: int | None
    """Bytes that this phase was forecast to take from the driver at its peak."""


@json_keys("step", "rung", "changes", "exact")
@dataclass(frozen=True)
class SteppedDown(Event):
    """The run goes on under a plan that needs less memory, from `step` (steps done) on."""

    type: ClassVar[str] = "stepped_down"
    step: int
    rung: int
    """Its number on the ladder, from 1."""
    changes: Mapping[str, Any]
    """The keys of the fit that change, with their new values."""
    exact: bool
    """Whether the result stays the same bit for bit."""


@json_keys("step", "seconds", "median", "reason", "detail")
@dataclass(frozen=True)
class Slow(Event):
    """Steps have become much slower than they were; said once until they are quick again."""

    type: ClassVar[str] = "slow"
    step: int
    seconds: float
    median: float
    """Of steps of the same sizes before."""
    reason: str
    """A code: "spilled", "others", "hot" or "unknown"."""
    detail: str
    """What the reason rests on, such as "chrome.exe 1.1 GiB" or "91 °C"; may be empty."""


@json_keys("phase", "seconds", "allocated", "reserved", "device", "host")
@dataclass(frozen=True)
class PhaseMemory(Event):
    """The highest use of memory in a phase so far in this attempt, in bytes; what is not known is None."""

    type: ClassVar[str] = "phase_memory"
    phase: ForecastPhase
    seconds: float
    """Spent in it in this attempt so far."""
    allocated: int | None
    """Handed out by PyTorch's allocator on the card."""
    reserved: int | None
    """Taken by it from the driver."""
    device: int | None
    """Taken from the driver by this process, CUDA context included."""
    host: int | None
    """Private main memory of this process, looked at after every step and at the end of a phase."""


@json_keys("code", "sentence", "remedy")
@dataclass(frozen=True)
class ErrorEvent(Event):
    """Why the attempt ends: what happened and what to do."""

    type: ClassVar[str] = "error"
    code: str
    sentence: str
    remedy: str


@json_keys("outcome", "step", "file", "run")
@dataclass(frozen=True)
class Finished(Event):
    """The last event of an attempt; `file` is the LoRA, relative to the run directory, None when none was written."""

    type: ClassVar[str] = "finished"
    outcome: Outcome
    step: int
    file: str | None
    run: str = ""
    """The run's name, by which it is resumed; earlier versions wrote none."""


@dataclass(frozen=True)
class UnknownEvent(Event):
    """A line of another version or a damaged one, kept as it is so that a reader loses nothing."""

    type: ClassVar[str] = "unknown"
    line: str


TYPES: Mapping[str, type[Event]] = {
    kind.type: kind
    for kind in (
        AttemptStarted,
        PhaseStarted,
        PhaseProgress,
        PhaseFinished,
        CachingSpeed,
        StepEvent,
        Validation,
        Preview,
        Saved,
        CheckpointEvent,
        Skipped,
        CommandEvent,
        Notice,
        MemoryExhausted,
        SteppedDown,
        Slow,
        PhaseMemory,
        ErrorEvent,
        Finished,
    )
}


class EventWriter:
    """Appends events to a run's `events.jsonl`; at most one may write at a time, the holder of the run's lock."""

    def __init__(self, path: Path, attempt: int) -> None:
        # Unbuffered: what a full disk refuses must not be tried again behind our back with the next event.
        self._file = files.long_path(path).open("ab", buffering=0)
        self._attempt = attempt

    def write(self, event: Event) -> Event:
        """Append one event, stamped with time and attempt, and return it so. Raises OSError and leaves no half line.

        The line reaches the system at once, so that a kill loses nothing; a power cut may lose the last seconds.
        """
        stamped = dataclasses.replace(event, time=time.time(), attempt=self._attempt)
        # A sentence may name a file whose name is no Unicode; a "?" there, as on a terminal, every reader can take.
        line = memoryview((to_line(stamped) + "\n").encode("utf-8", errors="replace"))
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise
        return stamped

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def to_line(event: Event) -> str:
    """Return an event as one line of JSON without its end; numbers that are not finite become null."""
    if isinstance(event, UnknownEvent):
        return event.line
    return json.dumps({"type": event.type} | _finite(to_record(event)), ensure_ascii=False, allow_nan=False)


def from_line(line: str) -> Event:
    """Return the event in one line of JSON; fields of later versions are left out, other types are `UnknownEvent`."""
    try:
        fields = parse_json(line)
        kind = TYPES[fields["type"]]
        return build(kind, fields, null_floats=True)
    except (ValueError, LookupError, TypeError, AttributeError):
        return UnknownEvent(line)


def read_events(path: Path, offset: int = 0, limit: int | None = None) -> tuple[list[Event], int]:
    """Return the events from byte `offset` on and the offset to go on from, as `read_lines` does of lines."""
    lines, end = read_lines(path, offset, limit)
    return [from_line(line) for line in lines], end


def read_lines(path: Path, offset: int = 0, limit: int | None = None) -> tuple[list[str], int]:
    """Return the lines from byte `offset` on and the offset to go on from; an unfinished one is left for then.

    A file that is missing is empty; one shorter than `offset` was replaced and is read from its start. With `limit`,
    about so many bytes are read, at least one line: whoever shows a long run takes it in parts.
    """
    try:
        with open_file(path, "listing") as file:
            size = file.seek(0, os.SEEK_END)
            start = offset if offset <= size else 0
            file.seek(start)
            data = file.read() if limit is None else file.read(limit)
            if limit is not None and b"\n" not in data:
                data += file.readline(_LONGEST_LINE)
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode("utf-8", errors="replace").split("\n")[:-1], start + len(whole)


def cut_torn_line(path: Path) -> None:
    """Remove what a kill or a power cut left after the last whole line."""
    block = 1 << 16
    with contextlib.suppress(FileNotFoundError), files.long_path(path).open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - block)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        file.truncate(end)


def latest_steps(events: Iterable[Event]) -> dict[int, StepEvent]:
    """Return each step's event from the latest attempt that made it, in the order of steps."""
    latest: dict[int, StepEvent] = {}
    for event in events:
        if isinstance(event, StepEvent) and (event.step not in latest or event.attempt >= latest[event.step].attempt):
            latest[event.step] = event
    return dict(sorted(latest.items()))


def _finite(fields: Mapping[str, object]) -> dict[str, object]:
    return dict(_finite_items(fields))


def _finite_items(fields: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield key, _finite(value)
        else:
            yield key, None if isinstance(value, float) and not math.isfinite(value) else value
