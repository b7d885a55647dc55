"""What the saver is asked to write, how far that is, and what stops it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from app.core.library import Field, FolderField, Value

AnyField = Field | FolderField
_FOLDER_FIELDS = frozenset(get_args(FolderField))


class Key(NamedTuple):
    """One value on disk: of an image, or of a folder where the field is a folder's. It outlives a session."""

    root: str
    """The folder that the user opened."""
    name: str
    """The image or folder within it, parts divided by slashes; empty for the root itself."""
    field: AnyField

    @property
    def path(self) -> Path:
        """The path of the image or folder."""
        return Path(self.root, self.name)

    @property
    def text(self) -> str:
        """The path as a string: ten times as fast to make, for a hundred thousand of them."""
        return os.path.join(self.root, self.name)  # noqa: PTH118 (ten times as fast)

    @property
    def of_folder(self) -> bool:
        """Return whether it is a fact of a folder."""
        return self.field in _FOLDER_FIELDS

    @property
    def folder(self) -> Path:
        """The folder, or the one that holds the image."""
        return self.path if self.of_folder else self.path.parent


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One value that is to be on disk, in place of one of those that we know of."""

    key: Key
    bases: tuple[Value, ...]
    """What may be replaced: the value last seen, and those that we may have written since. Anything else on disk was
    written by another program."""
    desired: Value
    picture: int | None = None
    """The image's id, where the edit was made in this session and is not a folder's."""
    number: int = 0
    """Number of the latest edit in the journal that is part of it."""
    shown: bool = False
    """Whether it was made in this session, so that the library holds it; not what an earlier session left."""
    first: int = 0
    """Number of the earliest edit that is part of it."""

    def leads_to(self, later: SaveRequest) -> bool:
        """Return whether the later edit was made on top of this one."""
        return later.bases[:1] == (self.desired,)

    def followed_by(self, later: SaveRequest) -> SaveRequest:
        """Return one request for both values, of which only the later is written; the earlier may be on disk."""
        return replace(later, bases=tuple(dict.fromkeys((*self.bases, self.desired, *later.bases))), first=self.first)

    def then(self, later: SaveRequest) -> SaveRequest:
        """Return what is to be written after a later edit: that alone, where it was not made on top of this one.

        The user then saw something else on disk and edited that, so this value is no longer wanted.
        """
        return self.followed_by(later) if self.leads_to(later) else later


@dataclass(frozen=True, slots=True)
class SaveProblem:
    """Why values wait to be written: what and why, what to do, and how many there are."""

    code: str
    sentence: str
    remedy: str
    waiting: int
    """Values that wait for this reason."""
    pictures: frozenset[int]
    """Ids of this session's images among them."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A value that both the user and another program changed: nothing is written until the user chooses."""

    key: Key
    mine: Value
    theirs: Value
    """What is on disk; None: no caption file, or nothing noted."""

    @property
    def path(self) -> Path:
        """The image or the folder."""
        return self.key.path

    @property
    def field(self) -> AnyField:
        """What of it."""
        return self.key.field


class DiskValue(NamedTuple):
    """What is on disk for an image, where the library may hold something else."""

    key: Key
    number: int
    """The latest edit that was settled with it: edits after that take precedence."""
    found: Value


@dataclass(frozen=True, slots=True)
class SaveNotice:
    """Something about saving that the user is shown once a session for each dataset.

    `notice.converted`: files in other encodings became UTF-8. `notice.beside_list`: captions of metadata.jsonl were
    changed in .txt files, which take precedence. `notice.recovered`: a session that stopped unexpectedly left edits.
    `notice.left`: a session that was closed left edits. The last two are sent when each edit has been tried again.
    `notice.backups_damaged`: the database of backups was damaged and is now `file`; a new one is in its place.
    """

    code: Literal["notice.converted", "notice.beside_list", "notice.recovered", "notice.left", "notice.backups_damaged"]
    root: str
    count: int
    in_conflict: int = 0
    """How many of them need the user's choice."""
    refused: int = 0
    """How many of them could not be written."""
    file: str = ""
    """The file that was set aside, with its path."""


@dataclass(frozen=True, slots=True)
class SaveState:
    """How far saving is. "All changes saved, originals backed up" holds when it is `clean`."""

    pending: int = 0
    """Values not on disk yet, those of problems and conflicts included."""
    saved: int = 0
    """Values settled in this session: written, or given up for what is on disk."""
    backed_up: bool = True
    """Whether an original was kept of all that was written."""
    problems: tuple[SaveProblem, ...] = ()
    conflicts: tuple[Conflict, ...] = ()

    @property
    def clean(self) -> bool:
        """Return whether everything is on disk."""
        return not self.pending and not self.problems
