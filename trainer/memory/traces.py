"""Gets the tapes of a subject: from memory, from the disk, and only where they are missing by tracing, with torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from trainer.memory.splicing import scaled
from trainer.memory.store import TapeStore
from trainer.memory.subject import Subject, TracePart
from trainer.memory.tape import Tape

Size = tuple[int, int]

# Every micro-batch above these follows from them; one of a single picture spares itself copies and follows from none.
SCALED_FROM = (2, 3)


@dataclass(frozen=True, slots=True)
class Steps:
    """Training on micro-batches of one shape; played in this order these tapes follow on one another."""

    weights: Tape
    """Base, adapter and masters, as they are placed."""
    micro_first: Tape
    """The first micro-batch of an optimizer step, in which the masters' gradients are born."""
    micro_more: Tape
    """Any further one."""
    optimizer_first: Tape
    """The first optimizer step of a run, in which its state appears."""
    optimizer: Tape


class Traces:
    """The tapes of any subject; those asked for once are kept."""

    def __init__(self, store: TapeStore, before_tracing: Callable[[], None] = lambda: None) -> None:
        """``before_tracing`` is called whenever tapes are missing; what it raises ends the asking."""
        self.store = store
        self.before_tracing = before_tracing
        self.made: list[str] = []
        """What had to be traced, for whoever wants to know why it took long."""
        self._kept: dict[str, tuple[Tape, ...]] = {}

    def steps(self, subject: Subject, bucket: Size, pictures: int) -> Steps:
        """Training on micro-batches of ``pictures`` in ``bucket``."""
        key = subject.key("steps", bucket, pictures)
        tapes = self._known(key) or self._scaled(subject, bucket, pictures)
        return Steps(*(tapes or self._keep(key, lambda: _trace_steps(subject, bucket, pictures))))

    def phase(self, subject: Subject, part: TracePart) -> tuple[Tape, ...]:
        """A phase other than training."""
        key = subject.key(part)
        found = self._known(key)
        return self._keep(key, lambda: _trace_phase(subject, part)) if found is None else found

    def has_steps(self, subject: Subject, bucket: Size, pictures: int) -> bool:
        """Whether the tapes of these micro-batches need not be traced."""
        asked = (pictures,) if pictures <= max(SCALED_FROM) else SCALED_FROM
        return all(self._known(subject.key("steps", bucket, size)) is not None for size in asked)

    def has_phase(self, subject: Subject, part: TracePart) -> bool:
        """Whether the tapes of this phase need not be traced."""
        return self._known(subject.key(part)) is not None

    def _scaled(self, subject: Subject, bucket: Size, pictures: int) -> tuple[Tape, ...] | None:
        """The tapes of a large micro-batch from those of two small ones; None where they do not follow exactly."""
        if pictures <= max(SCALED_FROM):
            return None
        one, other = (self.steps(subject, bucket, size) for size in SCALED_FROM)
        key = subject.key("steps", bucket, pictures)
        tapes = [scaled(a, b, SCALED_FROM, pictures) for a, b in zip(_in_order(one), _in_order(other), strict=True)]
        whole = tuple(tape for tape in tapes if tape is not None)
        if len(whole) < len(tapes):
            return None
        self._kept[key] = whole
        return whole

    def _known(self, key: str) -> tuple[Tape, ...] | None:
        if key not in self._kept and (tapes := self.store.load(key)) is not None:
            self._kept[key] = tapes
        return self._kept.get(key)

    def _keep(self, key: str, trace: Callable[[], tuple[Tape, ...]]) -> tuple[Tape, ...]:
        self.before_tracing()
        self._kept[key] = tapes = trace()
        self.made.append(key)
        with suppress(OSError):  # a full disk costs the next forecast some seconds, not this one its answer
            self.store.save(key, tapes)
        return tapes


def _in_order(steps: Steps) -> tuple[Tape, ...]:
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
