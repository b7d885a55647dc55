"""What is wrong with a job as it stands, what in it changes nothing, and what somebody should think over."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from app.core.jobs.values import Values, drop, value_at
from trainer.config.base import Family
from trainer.config.checks import doubtful, prodigy_at_a_small_rate, without_effect
from trainer.config.job import SCHEMA, Job
from trainer.config.paths import base_path_by_form, make_absolute
from trainer.config.problems import problems

_ANY: Values = {"schema": SCHEMA, "name": "job", "base": {"model": "a/base"}, "dataset": {"folders": [{"path": "."}]}}
_FOLDERS = "dataset.folders"
_MOST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Base:
    """What is known of a job's base; nothing yet, to begin with."""

    stated: str = ""
    """What the job says of it: another text is another base."""
    there: str = ""
    """The text of `base.model` if a look at the disk found it there."""
    family: Family | None = None
    zero_terminal_snr: bool = False

    def is_path(self, model: str, folder: Path) -> bool:
        """As `is_base_path`, by what is known."""
        told = base_path_by_form(model)
        return model == self.there if told is None else told


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a look at a job's values found."""

    job: Job | None = None
    """The job with absolute paths; None while something is wrong with it."""
    sound: Job | None = None
    """The job without what is wrong in it, filled up where something is missing; None where nothing helps."""
    problems: tuple[tuple[str, str], ...] = ()
    """Each fault as key and reason."""
    effectless: dict[str, str] = field(default_factory=dict)
    """Keys that change nothing in this combination, stated or not, with the reason."""
    doubts: dict[str, str] = field(default_factory=dict)
    """Keys that work and that hardly anybody wants so."""


def judge(values: Values, folder: Path, base: Base) -> Verdict:
    """Check values as the job file in `folder` holds them; touches no disk."""
    data = copy.deepcopy(values)
    faults = make_absolute(data, folder, base.is_path)
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        faults = [*faults, *problems(error, Job)]
    found = tuple(
        _without_parked(values, [(key, reason) for key, _, reason in (fault.partition(": ") for fault in faults)])
    )
    sound = job if not found else _sound(data, [key for key, _ in found])
    return Verdict(
        job=None if found else job,
        sound=sound,
        problems=found,
        effectless=_effectless(sound, base.family) if sound else {},
        doubts=_doubts(sound, base.zero_terminal_snr) if sound else {},
    )


def _without_parked(values: Values, found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Say that pictures are missing where the only folder holds the trigger word typed before there were any."""
    listed = value_at(values, _FOLDERS)
    if (
        not listed
        or not isinstance(listed, list)
        or any(not isinstance(each, dict) or "path" in each for each in listed)
    ):
        return found
    others = [fault for fault in found if not fault[0].startswith(_FOLDERS)]
    return [*others, (_FOLDERS, "is missing: the pictures to learn from")]


def _sound(data: Values, wrong: list[str]) -> Job | None:
    """The job without what is wrong in it, so that one bad number does not silence what is said of the others."""
    data = copy.deepcopy(data)
    for _ in range(_MOST_ROUNDS):
        for key in wrong:
            # What is missing goes with the table that it is missing from.
            drop(data, key if value_at(data, key) is not None else key.rpartition(".")[0] or key)
        for key, value in _ANY.items():
            data.setdefault(key, copy.deepcopy(value))
        try:
            return Job.model_validate(data)
        except ValidationError as error:
            wrong = [fault.partition(": ")[0] for fault in problems(error, Job)]
    return None


def _effectless(job: Job, family: Family | None) -> dict[str, str]:
    """What changes nothing; while the base is not known, only what does so with either."""
    families: tuple[Family, ...] = (family,) if family else ("sd15", "sdxl")
    first, *others = (dict(without_effect(job, one)) for one in families)
    return {key: reason for key, reason in first.items() if all(key in other for other in others)}


def _doubts(job: Job, zero_terminal_snr: bool) -> dict[str, str]:
    known = job.base.zero_terminal_snr
    certain = known if isinstance(known, bool) else zero_terminal_snr
    return {**dict(doubtful(job, zero_terminal_snr=certain)), **dict(prodigy_at_a_small_rate(job.recipe))}
