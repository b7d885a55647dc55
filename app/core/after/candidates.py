"""What a run saved that may be the one to keep: each saved step with its held-out loss and its pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from app.core.runs.series import lowest
from trainer.protocol import events
from trainer.protocol.files import step_ending

if TYPE_CHECKING:
    from app.core.runs.run import Run


@dataclass(frozen=True, slots=True)
class Candidate:
    """A saved LoRA."""

    step: int
    file: Path
    held_out: float | None = None
    """The loss on held-out pictures at that step; None where it was not measured."""
    best: bool = False
    """Whether no other has a lower one."""
    last: bool = False
    """Whether it is the result of the whole run."""
    pictures: dict[int, Path] = field(default_factory=dict)
    """The previews of that step, by the number of their prompt."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the events of a run say of its saved steps; a copy, to be looked at on a worker."""

    folder: Path
    saved: tuple[events.Saved, ...]
    validations: tuple[events.Validation, ...]
    previews: tuple[events.Preview, ...]

    @classmethod
    def of(cls, run: Run) -> Told:
        """Copy what is known of a run."""
        return cls(run.directory.path, tuple(run.saved), tuple(run.validations), tuple(run.previews))


def candidates(told: Told) -> list[Candidate]:
    """Return the saved steps whose files are there, by step; looks at the disk."""
    files = _files(told)
    losses = {one.step: one.loss for one in told.validations if one.held_out}
    measured = {step: loss for step in files if (loss := losses.get(step)) is not None and math.isfinite(loss)}
    best = lowest(measured)
    pictures: dict[int, dict[int, Path]] = {}
    for preview in told.previews:
        pictures.setdefault(preview.step, {})[preview.index] = told.folder / preview.file
    return [
        Candidate(step, file, measured.get(step), step == best, last, dict(sorted(pictures.get(step, {}).items())))
        for step, (file, last) in sorted(files.items())
    ]


def _files(told: Told) -> dict[int, tuple[Path, bool]]:
    """The file of each step that is there, and whether it is the run's result, whose name does not end in its step."""
    files: dict[int, tuple[Path, bool]] = {}
    for saved in told.saved:
        path, last = told.folder / saved.file, not Path(saved.file).stem.endswith(step_ending(saved.step))
        if path.is_file() and (last or saved.step not in files):
            files[saved.step] = path, last
    results = [step for step, (_, last) in files.items() if last]
    for step in results[:-1]:  # a run that went on after its end wrote its result again: the latest holds
        files[step] = files[step][0], False
    return files


def named(found: Iterable[Candidate], step: int) -> Candidate | None:
    """Return the candidate of a step."""
    return next((one for one in found if one.step == step), None)
