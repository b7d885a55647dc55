"""How far saving is, and what stands in its way, as `Saver` tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from app.core.edits.wishes import AnyField, Key
from app.core.pictures import Value


@dataclass(frozen=True, slots=True)
class SaveProblem:
    """Why something waits to be written: what and why, what to do, and how much it is."""

    code: str
    sentence: str
    remedy: str
    waiting: int
    """Values that wait for this reason."""
    pictures: frozenset[int]
    """Those of this session among them."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A value that another program changed while the user did: nothing is written until he chose."""

    key: Key
    mine: Value
    theirs: Value
    """What stands on disk; None: no caption file, or nothing noted."""

    @property
    def path(self) -> Path:
        """The picture or the folder."""
        return self.key.path

    @property
    def field(self) -> AnyField:
        """What of it."""
        return self.key.field


class Learned(NamedTuple):
    """What stands on disk of a picture, where the library may hold something else."""

    key: Key
    number: int
    """Of the latest edit that was brought to disk with it, or is void: one after that counts more."""
    found: Value


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about writing that the user hears once a session for each dataset.

    `notice.converted`: files in other encodings became UTF-8. `notice.beside_list`: captions of metadata.jsonl were
    changed in .txt files, which come before it. `notice.recovered`: edits of a session that crashed are being written.
    """

    code: Literal["notice.converted", "notice.beside_list", "notice.recovered"]
    root: str
    count: int


@dataclass(frozen=True, slots=True)
class SaveState:
    """How far saving is. "All changes saved, originals backed up" holds when it is `clean`."""

    pending: int = 0
    """Values not on disk yet, those of problems and conflicts included."""
    saved: int = 0
    """Values brought to disk in this session."""
    backed_up: bool = True
    """Whether an original was kept of all that was written."""
    problems: tuple[SaveProblem, ...] = ()
    conflicts: tuple[Conflict, ...] = ()

    @property
    def clean(self) -> bool:
        """Tell whether all is on disk."""
        return not self.pending and not self.problems
