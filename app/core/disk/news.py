"""What a worker that looks at a dataset's folders tells the thread that owns the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from app.core.pictures import Folder
from trainer.dataset.folders import FolderMarks
from trainer.errors import ImpastoError

Stage = Literal["listing", "captions", "sizes", "done"]


@dataclass(frozen=True, slots=True)
class Found:
    """Pictures that were not there before, with what the directory says of each; at most a batch of one folder."""

    folder: Folder
    pictures: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known now of pictures of a folder, by name."""

    folder: Folder
    pictures: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Gone:
    """Pictures that two looks in a row did not find."""

    folder: Folder
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Marked:
    """What holds for all pictures of a folder."""

    folder: Folder
    marks: FolderMarks


@dataclass(frozen=True, slots=True)
class Strays:
    """Names of all files of a folder that were to belong to a picture which is not there, by the code of their kind."""

    folder: Folder
    names: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that the user should know of; the rest goes on."""

    error: ImpastoError


@dataclass(frozen=True, slots=True)
class Notes:
    """Whether the notes of a folder can be read; None: they can, or there are none."""

    folder: Folder
    error: ImpastoError | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The dataset's folder cannot be reached, or is empty all of a sudden; None: it is there again."""

    error: ImpastoError | None


@dataclass(frozen=True, slots=True)
class Step:
    """How far a look has come: pictures done, and how many there are as far as is known."""

    stage: Stage
    done: int
    total: int


News = Found | Facts | Gone | Marked | Strays | Notes | Trouble | Lost | Step
