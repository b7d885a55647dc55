"""What the app knows of one picture, of the folder it lies in, and of how either changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

Crop = tuple[float, float, float, float]
"""Left, top, right and bottom as fractions of the upright picture, as impasto.jsonl keeps them."""
Field = Literal["caption", "rating", "excluded", "crop"]
"""What the user can change of a picture."""
Value = str | int | bool | Crop | None
FolderField = Literal["repeats", "regularisation", "trigger"]
"""What the user can change of a folder."""
Fact = Literal["size", "file", "problem", "mask", "inspection", "folder"]
"""What a look at the disk can show of a picture."""


@dataclass(slots=True, eq=False)
class Folder:
    """One directory of a dataset: `root` is the folder that the user opened, this one or one above it."""

    path: Path
    root: Path
    repeats: int | None = None
    regularisation: bool = False
    trigger: str | None = None


@dataclass(slots=True, eq=False)
class Picture:
    """One picture; only `Library.apply` and `Library.learn` change it, on the thread that owns the library."""

    id: int
    """Its number in this session, never used again."""
    folder: Folder
    name: str
    bytes: int = 0
    changed_ns: int = 0
    """When the file was last written."""
    width: int | None = None
    """Upright pixels; None until somebody has looked."""
    height: int | None = None
    caption: str | None = None
    """The caption file's text as it stands, None where there is none."""
    rating: int | None = None
    excluded: bool = False
    crop: Crop | None = None
    clash: bool = False
    """Whether it has several captions that differ, of which only the first counts."""
    mask: bool = False
    """Whether NAME-masklabel.png lies beside it."""
    mask_changed_ns: int = 0
    """When that was last written."""
    problem: str | None = None
    """Why it cannot be used: a sentence."""
    content: str | None = None
    """SHA-256 of its bytes in hex; None until it was inspected."""
    fingerprint: str | None = None
    """Perceptual hash in hex, with the sizes of an inspection."""

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self.folder.path / self.name

    def value(self, field: Field) -> Value:
        """Return what the user can change."""
        value: Value = getattr(self, field)
        return value


class Change(NamedTuple):
    """One value of one picture before and after."""

    picture: int
    field: Field
    before: Value
    after: Value

    def inverse(self) -> Change:
        """Return the change that takes this one back."""
        return Change(self.picture, self.field, self.after, self.before)


class FolderChange(NamedTuple):
    """One fact of one folder before and after."""

    folder: Folder
    field: FolderField
    before: str | int | bool | None
    after: str | int | bool | None

    def inverse(self) -> FolderChange:
        """Return the change that takes this one back."""
        return FolderChange(self.folder, self.field, self.after, self.before)


@dataclass(frozen=True, slots=True)
class Altered:
    """What became different in the library at one moment: ids of pictures, and what of the altered ones."""

    added: frozenset[int] = frozenset()
    removed: frozenset[int] = frozenset()
    altered: frozenset[int] = frozenset()
    what: frozenset[Field | Fact] = field(default_factory=frozenset)
