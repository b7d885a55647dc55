"""Gets the tapes of a subject: from memory, from the disk, and only where they are missing by tracing, with torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from trainer.base.imports import quick_imports
from trainer.cores import usable_cores
from trainer.memory.aside import TracerAside, Wish
from trainer.memory.outline import Outline, outline_of
from trainer.memory.splicing import scaled
from trainer.memory.store import TapeStore
from trainer.memory.subject import Subject, TracePart
from trainer.memory.tape import Tape

Size = tuple[int, int]
T = TypeVar("T", Tape, Outline)

# Larger micro-batches follow from these two; one of a single picture spares itself copies and follows from none.
SCALED_FROM = (2, 3)
# A base of which one trace takes so many seconds of the processor (SDXL's on slow cores) is worth a process beside this
# one, which takes twice that to start.
LONG = 2.5
# Up to here one trace costs less than two, unless both are known.
LARGEST_TRACED = 4


@dataclass(frozen=True, slots=True)
class Steps(Generic[T]):
    """Training on micro-batches of one shape, as tapes or their outlines; in this order they follow on one another."""

    weights: T
    """Base, adapter and masters, as they are placed."""
    micro_first: T
    """The first micro-batch of an optimizer step, in which the masters' gradients are born."""
    micro_more: T
    """Any further one."""
    optimizer_first: T
    """The first optimizer step of a run, in which its state appears."""
    optimizer: T


class Traces:
    """The tapes of any subject; those asked for once are kept."""

    def __init__(
        self,
        store: TapeStore,
        before_tracing: Callable[[], None] = lambda: None,
        aside: TracerAside | None = None,
    ) -> None:
        """``before_tracing`` is called whenever tapes are missing; what it raises ends the asking.

        ``aside`` traces into the same store meanwhile what is foreseen to be asked for, as ``helped`` lets one do.
        """
        self.store = store
        self.before_tracing = before_tracing
        self.aside = aside
        self.used: set[str] = set()
        """The keys of all entries that were asked for."""
        self.made: list[str] = []
        """Those of them that had to be traced."""
        self._tapes: dict[str, tuple[Tape, ...]] = {}
        self._outlines: dict[str, tuple[Outline, ...]] = {}
        self._foreseen: Sequence[Wish] = ()

    @contextmanager
    def helped(self) -> Iterator[None]:
        """Let a process beside this one trace what is foreseen, until the block ends."""
        with TracerAside(self.store) as self.aside:
            try:
                yield
            finally:
                self.aside = None

    def foresee(self, wishes: Sequence[Wish]) -> None:
        """Say what is likely to be asked for after the next tapes that are missing, the soonest first."""
        self._foreseen = wishes

    def fulfil(self, wish: Wish) -> None:
        """Have these tapes on the disk."""
        if wish.part == "steps":
            self.steps(wish.subject, *wish.more)
        else:
            self.phase(wish.subject, wish.part)

    def steps(self, subject: Subject, bucket: Size, pictures: int) -> Steps[Tape]:
        """Training on micro-batches of ``pictures`` in ``bucket``."""
        key = subject.key("steps", bucket, pictures)
        tapes = self._read(key) or self._scaled(subject, bucket, pictures)
        return Steps(*(tapes or self._trace(key, lambda: _trace_steps(subject, bucket, pictures))))

    def step_outlines(self, subject: Subject, bucket: Size, pictures: int) -> Steps[Outline]:
        """What the tapes of ``steps`` add up to."""
        key = subject.key("steps", bucket, pictures)
        found = self._read_outlines(key)
        if found is None:
            found = self._outlined(key, _in_order(self.steps(subject, bucket, pictures)))
        return Steps(*found)

    def phase(self, subject: Subject, part: TracePart) -> tuple[Tape, ...]:
        """A phase other than training."""
        key = subject.key(part)
        found = self._read(key)
        return self._trace(key, lambda: _trace_phase(subject, part)) if found is None else found

    def phase_outlines(self, subject: Subject, part: TracePart) -> tuple[Outline, ...]:
        """What the tapes of ``phase`` add up to."""
        key = subject.key(part)
        found = self._read_outlines(key)
        return self._outlined(key, self.phase(subject, part)) if found is None else found

    def has_steps(self, subject: Subject, bucket: Size, pictures: int) -> bool:
        """Whether the tapes of these micro-batches need not be traced."""
        if self._read_outlines(subject.key("steps", bucket, pictures)) is not None:
            return True
        return pictures > max(SCALED_FROM) and self._has_both(subject, bucket)

    def has_phase(self, subject: Subject, part: TracePart) -> bool:
        """Whether the tapes of this phase need not be traced."""
        return self._read_outlines(subject.key(part)) is not None

    def _scaled(self, subject: Subject, bucket: Size, pictures: int) -> tuple[Tape, ...] | None:
        """The tapes of a large micro-batch from those of two small ones; None where they do not follow exactly."""
        if pictures <= max(SCALED_FROM) or (pictures <= LARGEST_TRACED and not self._has_both(subject, bucket)):
            return None
        one, other = (self.steps(subject, bucket, size) for size in SCALED_FROM)
        tapes = [scaled(a, b, SCALED_FROM, pictures) for a, b in zip(_in_order(one), _in_order(other), strict=True)]
        whole = tuple(tape for tape in tapes if tape is not None)
        return self._keep(subject.key("steps", bucket, pictures), whole) if len(whole) == len(tapes) else None

    def _has_both(self, subject: Subject, bucket: Size) -> bool:
        return all(self._read_outlines(subject.key("steps", bucket, size)) is not None for size in SCALED_FROM)

    def _read(self, key: str) -> tuple[Tape, ...] | None:
        if key not in self._tapes and (tapes := self.store.load(key)) is not None:
            self._tapes[key] = tapes
            self.used.add(key)
        return self._tapes.get(key)

    def _read_outlines(self, key: str) -> tuple[Outline, ...] | None:
        if key not in self._outlines and (outlines := self.store.outlines(key)) is not None:
            self._outlines[key] = outlines
            self.used.add(key)
        return self._outlines.get(key)

    def _outlined(self, key: str, tapes: Sequence[Tape]) -> tuple[Outline, ...]:
        """What tapes add up to that are here by now: traced just now, or made by others meanwhile."""
        if key not in self._outlines:
            self._outlines[key] = tuple(map(outline_of, tapes))
        return self._outlines[key]

    def _trace(self, key: str, trace: Callable[[], tuple[Tape, ...]]) -> tuple[Tape, ...]:
        self.before_tracing()
        with quick_imports():  # seconds of their own, the first time
            from trainer.memory import phases, steps  # noqa: F401
        self.before_tracing()  # who asked may have asked for something else meanwhile
        self.made.append(key)
        if self.aside is not None:
            self.aside.finish(key)
            if (found := self._read(key)) is not None:
                return found
        began = time.process_time()
        tapes = self._keep(key, trace())
        if time.process_time() - began > LONG:
            self._look_ahead()
        return tapes

    def _look_ahead(self) -> None:
        """Have begun, in the process beside this one, what is missing of what is foreseen; on a single core nothing."""
        wishes, self._foreseen = self._foreseen, ()
        if self.aside is None or usable_cores() < 2:
            return
        for wish in wishes:
            if self._read_outlines(wish.key) is None:
                self.aside.ask(wish)

    def _keep(self, key: str, tapes: Sequence[Tape]) -> tuple[Tape, ...]:
        self._tapes[key] = kept = tuple(tapes)
        self._outlines[key] = tuple(map(outline_of, kept))
        self.used.add(key)
        with suppress(OSError):  # a full disk costs the next forecast some seconds, not this one its answer
            self.store.save(key, kept)
        return kept


def _in_order(steps: Steps[Tape]) -> tuple[Tape, ...]:
    return steps.weights, steps.micro_first, steps.micro_more, steps.optimizer_first, steps.optimizer


def _trace_steps(subject: Subject, bucket: Size, pictures: int) -> tuple[Tape, ...]:
    from trainer.memory.steps import trace_steps

    traced = trace_steps(subject, [bucket], pictures)
    return (
        traced.weights,
        traced.micro_first[bucket],
        traced.micro_more[bucket],
        traced.optimizer_first,
        traced.optimizer,
    )


def _trace_phase(subject: Subject, part: TracePart) -> tuple[Tape, ...]:
    from trainer.memory import phases

    return tuple(getattr(phases, part)(subject))
