"""How the jobs of several runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config.job import Job
from trainer.config.resolve import flat

_SAME_MEANING = ("name",)
# What a machine, not an artist, decided; it is told apart because it changes no result beyond rounding.
_OF_THE_MACHINE = "fit."


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose values are not all the same; a value that a job does not have is None."""

    key: str
    values: tuple[object, ...]
    fit: bool
    """Whether it only says how the run was made to fit its machine."""


def differences(jobs: Sequence[Job]) -> list[Difference]:
    """Return the keys in which jobs differ, in the order of the file, those of the fit last."""
    tables = [dict(flat(job.model_dump(mode="json", by_alias=True), "")) for job in jobs]
    keys = dict.fromkeys(key for table in tables for key in table)
    found = [
        Difference(key, values, key.startswith(_OF_THE_MACHINE))
        for key in keys
        if key not in _SAME_MEANING and not _equal(values := tuple(table.get(key) for table in tables))
    ]
    return sorted(found, key=lambda difference: difference.fit)


def _equal(values: tuple[object, ...]) -> bool:
    return all(value == values[0] for value in values)
