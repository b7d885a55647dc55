"""Define the events that a run writes to `events.jsonl`, one JSON line each.

Events contain codes and numbers, which the display turns into text; only error and notice events contain sentences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal

from trainer.protocol import files
from trainer.protocol.forecast import ForecastPhase
from trainer.protocol.reading import open_file, parse_json
from trainer.protocol.records import build, json_keys, renamed, to_record

Phase = Literal["download", "load", "check", "cache_pictures", "cache_texts", "train", "preview", "validate", "save"]
Outcome = Literal["done", "paused", "stopped", "failed"]

_LONGEST_LINE = 1 << 24  # bytes; a line written by another program could otherwise fill the memory

MAX_RATE = 1e6
"""Highest plausible rate in items per second; a higher rate means that the time was too short to measure."""

OnPhase = Callable[[Phase, int, int], None]
"""Progress callback, called with the phase, the number of units done, and the total number of units."""


@json_keys("time", "attempt")
@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of all events; the writer fills in both fields."""

    type: ClassVar[str]
    time: float = 0.0
    """Unix time in seconds."""
    attempt: int = 0
    """Number of the engine start that wrote the event, counted from 1."""


@json_keys("pid", "device", "step_seconds")
@dataclass(frozen=True)
class AttemptStarted(Event):
    """The engine started; `device` is as in the job, such as "cpu" or "cuda:0"."""

    type: ClassVar[str] = "attempt_started"
    pid: int
    device: str
    step_seconds: float | None = None
    """Forecast seconds per step; None without a forecast."""


@json_keys("phase", "total")
@dataclass(frozen=True)
class PhaseStarted(Event):
    """A phase started; `total` is its number of units (bytes, files, images, texts or steps) or None if unknown."""

    type: ClassVar[str] = "phase_started"
    phase: Phase
    total: int | None


@json_keys("phase", "done", "total")
@dataclass(frozen=True)
class PhaseProgress(Event):
    """Progress of a phase: `done` of `total` units, such as images."""

    type: ClassVar[str] = "phase_progress"
    phase: Phase
    done: int
    total: int | None


@json_keys("phase", "seconds")
@dataclass(frozen=True)
class PhaseFinished(Event):
    """A phase finished after `seconds`."""

    type: ClassVar[str] = "phase_finished"
    phase: Phase
    seconds: float


@json_keys("phase", "count", "seconds", "decode", "encode", "write")
@dataclass(frozen=True)
class CachingSpeed(Event):
    """Speed of encoding images or texts, and the speed that each of the concurrent stages could reach alone."""

    type: ClassVar[str] = "cached"
    phase: Literal["cache_pictures", "cache_texts"]
    count: int
    seconds: float
    decode: float | None
    """Images per second if decoding never waited for another stage; None for texts."""
    encode: float
    """Items per second if the VAE or the text encoders never waited for another stage."""
    write: float
    """Items per second if writing to disk never waited for another stage."""

    @property
    def rate(self) -> float:
        """Return the items per second of all stages together."""
        return self.count / max(self.seconds, 1e-3)

    @property
    def limits(self) -> dict[str, float]:
        """Return the items per second that each stage (decode, encode, write) could reach alone, if measurable."""
        stages = {"decode": self.decode, "encode": self.encode, "write": self.write}
        return {name: limit for name, limit in stages.items() if limit and limit < MAX_RATE}


@json_keys(
    "step", "epoch", "loss", "grad_norm", "learning_rates", "images", "seconds", "skipped", "loss_scale", "memory",
    "data_seconds", "reserved",
    former={"pictures": "images"},
)  # fmt: skip
@dataclass(frozen=True)
class StepEvent(Event):
    """One optimizer step. Non-finite numbers are None, because JSON cannot represent them."""

    type: ClassVar[str] = "step"
    step: int
    """Number of the step, counted from 1."""
    epoch: int
    loss: float | None
    grad_norm: float | None
    """Gradient norm before clipping."""
    learning_rates: Mapping[str, float]
    """Learning rate by part: unet, text_encoder, text_encoder_2."""
    images: int
    """Number of images in the step."""
    seconds: float
    skipped: bool = False
    """Whether the optimizer update was skipped because a value was not finite."""
    loss_scale: float | None = None
    """Loss scale; None unless training in fp16."""
    memory: int | None = None
    """Peak bytes allocated on the training device since the last step; None if unknown."""
    data_seconds: float | None = None
    """Seconds of the step in which training waited for data; None in events of older versions."""
    reserved: int | None = None
    """Peak bytes that PyTorch's allocator reserved from the driver since the last step; None if unknown."""


@json_keys("step", "loss", "held_out", "per_timestep")
@dataclass(frozen=True)
class Validation(Event):
    """Validation loss with fixed noise; `held_out` says whether it was measured on images that are not trained on."""

    type: ClassVar[str] = "validation"
    step: int
    loss: float | None
    held_out: bool
    per_timestep: Mapping[str, float | None]
    """Loss by timestep; the keys are strings because JSON allows no others."""


@json_keys("step", "index", "file", "seconds", "ema")
@dataclass(frozen=True)
class Preview(Event):
    """A preview was generated; `file` is relative to the run directory, `index` counts prompts from 0."""

    type: ClassVar[str] = "preview"
    step: int
    index: int
    file: str
    seconds: float
    ema: bool | None = None
    """Whether it shows the moving average of the weights; None if there is none."""


@json_keys("step", "file", "sha256", "ema")
@dataclass(frozen=True)
class Saved(Event):
    """A LoRA file was written and checked; `file` is relative to the run directory."""

    type: ClassVar[str] = "saved"
    step: int
    file: str
    sha256: str
    ema: bool | None = None
    """Whether it is the moving average of the weights; None if there is none."""


@json_keys("step", "folder")
@dataclass(frozen=True)
class CheckpointEvent(Event):
    """A resumable checkpoint was completed; `folder` is its name in checkpoints/."""

    type: ClassVar[str] = "checkpoint"
    step: int
    folder: str


@json_keys("step", "reason")
@dataclass(frozen=True)
class Skipped(Event):
    """A step was skipped; `reason` is a code such as "loss", "gradient" or "scale"."""

    type: ClassVar[str] = "skipped"
    step: int
    reason: str


@json_keys("name", "outcome", "detail")
@dataclass(frozen=True)
class CommandEvent(Event):
    """Result of a command; `outcome` is a `commands.CommandOutcome`."""

    type: ClassVar[str] = "command"
    name: str
    outcome: str
    detail: str


@json_keys("code", "sentence")
@dataclass(frozen=True)
class Notice(Event):
    """Message for the user that does not stop the run."""

    type: ClassVar[str] = "notice"
    code: str
    sentence: str


@json_keys("phase", "step", "requested", "stage", "module", "allocated", "reserved", "forecast")
@dataclass(frozen=True)
class MemoryExhausted(Event):
    """Memory ran out; later events say how the run continued. Unknown values are None or empty."""

    type: ClassVar[str] = "memory_exhausted"
    phase: ForecastPhase
    step: int
    """Number of completed optimizer steps."""
    requested: int | None
    """Bytes of the allocation that failed."""
    stage: str
    """Part of the step: "forward", "backward", "accumulate", "measure", "clip", "optimizer" or "refresh"."""
    module: str
    """Module of the model, such as "unet.up_blocks.1.attentions.0"."""
    allocated: int | None
    """Bytes that PyTorch had allocated on the GPU when memory ran out."""
    reserved: int | None
    """Bytes that PyTorch had reserved from the driver when memory ran out."""
    forecast: int | None
    """Peak bytes that the phase was forecast to reserve from the driver."""


@json_keys("step", "fallback", "changes", "exact", former={"rung": "fallback"})
@dataclass(frozen=True)
class SteppedDown(Event):
    """The run continues with a fit that needs less memory; `step` is the number of completed optimizer steps."""

    type: ClassVar[str] = "stepped_down"
    step: int
    fallback: int
    """Number of the fallback step that was taken, counted from 1."""
    changes: Mapping[str, Any]
    """Changed keys of the fit with their new values."""
    exact: bool
    """Whether the result stays bit-for-bit the same."""


@json_keys("step", "seconds", "median", "reason", "detail")
@dataclass(frozen=True)
class Slow(Event):
    """Steps became much slower than before. The event is not repeated until steps have been fast again."""

    type: ClassVar[str] = "slow"
    step: int
    seconds: float
    median: float
    """Median seconds of earlier steps on micro-batches of the same sizes."""
    reason: str
    """Code of the reason: "spilled", "others", "hot" or "unknown"."""
    detail: str
    """Evidence for the reason, such as "chrome.exe 1.1 GiB" or "91 °C"; may be empty."""


@json_keys("step", "share", "fixed")
@dataclass(frozen=True)
class DataWait(Event):
    """Training waits for images and cached data more than it should; reported once per attempt."""

    type: ClassVar[str] = "data_wait"
    step: int
    share: float
    """Share (0 to 1) of the last steps' time in which training waited."""
    fixed: Sequence[str]
    """Keys of [fit] that the job sets and that limit loading: loader_workers, prefetch_batches."""


@json_keys("step", "memory", "since", "rate", "held", "grown", "grew")
@dataclass(frozen=True)
class MemoryLeak(Event):
    """Memory that keeps growing from step to step; reported once per attempt for each kind of memory."""

    type: ClassVar[str] = "memory_leak"
    step: int
    memory: Literal["gpu", "main"]
    """Which memory grows: that allocated on the GPU, or this process's private main memory."""
    since: int
    """Last step before it began to grow."""
    rate: float
    """Growth per 100 steps, as a fraction of the memory held at `since`."""
    held: int
    """Bytes held after the step."""
    grown: int
    """Bytes by which memory has grown since then."""
    grew: Mapping[str, int]
    """What grew most in the latest steps, largest first, with its growth in bytes: a kind of memory as in a forecast's
    peaks, tensors by dtype and shape such as "float32 4x64x64", or "other" for memory without a tensor in Python."""


@json_keys("phase", "allocated", "reserved")
@dataclass(frozen=True)
class MemorySample(Event):
    """Peak GPU memory since the previous sample, in a phase other than training, whose steps have their own peaks.

    Written at the end of each time that the phase runs, and about once a second while it reports progress.
    """

    type: ClassVar[str] = "memory_sample"
    phase: ForecastPhase
    allocated: int
    """Peak bytes allocated by PyTorch."""
    reserved: int
    """Peak bytes that PyTorch's allocator reserved from the driver."""


@json_keys("phase", "seconds", "allocated", "reserved", "device", "host")
@dataclass(frozen=True)
class PhaseMemory(Event):
    """Peak memory of a phase so far in this attempt, in bytes; unknown values are None."""

    type: ClassVar[str] = "phase_memory"
    phase: ForecastPhase
    seconds: float
    """Seconds spent in the phase so far in this attempt."""
    allocated: int | None
    """Peak bytes allocated by PyTorch on the GPU."""
    reserved: int | None
    """Peak bytes that PyTorch's allocator reserved from the driver."""
    device: int | None
    """Peak GPU bytes of this process, CUDA context included."""
    host: int | None
    """Peak private main memory of this process, sampled after every step and at the end of a phase."""


@json_keys("code", "sentence", "remedy")
@dataclass(frozen=True)
class ErrorEvent(Event):
    """Error that ended the attempt, with what happened and what to do."""

    type: ClassVar[str] = "error"
    code: str
    sentence: str
    remedy: str


@json_keys("outcome", "step", "file", "run")
@dataclass(frozen=True)
class Finished(Event):
    """Last event of an attempt; `file` is the LoRA file relative to the run directory, None if none was written."""

    type: ClassVar[str] = "finished"
    outcome: Outcome
    step: int
    file: str | None
    run: str = ""
    """Name of the run, for `resume`; empty in events of earlier versions."""


@dataclass(frozen=True)
class UnknownEvent(Event):
    """Line that is damaged or from another version; it is kept unchanged to avoid losing data."""

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
        DataWait,
        MemoryLeak,
        MemorySample,
        PhaseMemory,
        ErrorEvent,
        Finished,
    )
}


class EventWriter:
    """Writer that appends events to a run's `events.jsonl`; only the holder of the run's lock may use it."""

    def __init__(self, path: Path, attempt: int) -> None:
        # Unbuffered: a buffer would write an event that a full disk refused again, together with the next one.
        self._file = files.long_path(path).open("ab", buffering=0)
        self._attempt = attempt

    def write(self, event: Event) -> Event:
        """Append one event and return it with its time and attempt.

        The line is passed to the operating system at once, so nothing is lost if the process is killed; a power outage
        may lose the last seconds. If OSError is raised, no partial line is left.
        """
        stamped = dataclasses.replace(event, time=time.time(), attempt=self._attempt)
        # A sentence may contain a file name that is not valid Unicode; replace those characters with "?".
        line = memoryview((to_line(stamped) + "\n").encode("utf-8", errors="replace"))
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:  # the file is unbuffered, so one call may write only a part
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
    """Return an event as a JSON line without a line break; non-finite numbers become null."""
    if isinstance(event, UnknownEvent):
        return event.line
    return json.dumps({"type": event.type} | _finite(to_record(event)), ensure_ascii=False, allow_nan=False)


def from_line(line: str) -> Event:
    """Return the event in a JSON line, ignoring unknown fields; an `UnknownEvent` if it cannot be read."""
    try:
        fields = parse_json(line)
        kind = TYPES[fields["type"]]
        if kind is SteppedDown:
            fields["changes"] = renamed(fields["changes"], "fit")
        return build(kind, fields, null_floats=True)
    except (ValueError, LookupError, TypeError, AttributeError):
        return UnknownEvent(line)


def read_events(path: Path, offset: int = 0, limit: int | None = None) -> tuple[list[Event], int]:
    """Return the events from byte `offset` on and the offset to continue from; see `read_lines`."""
    lines, end = read_lines(path, offset, limit)
    return [from_line(line) for line in lines], end


def read_lines(path: Path, offset: int = 0, limit: int | None = None) -> tuple[list[str], int]:
    """Return the complete lines from byte `offset` on and the offset to continue from.

    A missing file counts as empty; a file shorter than `offset` was replaced and is read from its start. With `limit`,
    about that many bytes are read, but at least one line, which allows reading a long run in parts.
    """
    try:
        with open_file(path, "listing") as file:
            size = file.seek(0, os.SEEK_END)
            start = offset if offset <= size else 0
            file.seek(start)
            data = file.read() if limit is None else file.read(limit)
            if limit is not None and b"\n" not in data:
                # A line longer than `limit`: without its end, the caller would read the same part forever.
                data += file.readline(_LONGEST_LINE)
    except FileNotFoundError:
        return [], 0
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode("utf-8", errors="replace").split("\n")[:-1], start + len(whole)


def cut_torn_line(path: Path) -> None:
    """Remove a partial line that a killed process or a power outage left at the end of a file."""
    block = 1 << 16
    with contextlib.suppress(FileNotFoundError), files.long_path(path).open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        # Backward from the end in blocks: the file of a long run is large, and its last line break is near the end.
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
    """Return the step events by step in ascending order, each from the latest attempt that trained the step."""
    latest: dict[int, StepEvent] = {}
    for event in events:
        if isinstance(event, StepEvent) and (event.step not in latest or event.attempt >= latest[event.step].attempt):
            latest[event.step] = event
    return dict(sorted(latest.items()))


def attempt_seconds(written: Iterable[Event]) -> Iterator[float]:
    """Yield the seconds of each attempt, from its first to its last event."""
    times: dict[int, list[float]] = {}
    for event in written:
        times.setdefault(event.attempt, []).append(event.time)
    yield from (seen[-1] - seen[0] for seen in times.values())


def _finite(fields: Mapping[str, object]) -> dict[str, object]:
    return dict(_finite_items(fields))


def _finite_items(fields: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield key, _finite(value)
        else:
            yield key, None if isinstance(value, float) and not math.isfinite(value) else value
