"""Datasets on a desk, with everything they reported."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from app.core.disk.datasets import Datasets, OnDisk
from app.core.library import LibraryChange, LibraryImage
from tests.support.desk import Desk
from trainer.errors import ImpastoError


class Open:
    """Datasets of a desk's library."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.library = desk.library
        self.datasets = Datasets(desk.library, desk.tasks)
        self.problems: list[ImpastoError] = []
        self.differs: list[OnDisk] = []
        self.changes: list[LibraryChange] = []
        self.datasets.problems.connect(self.problems.append)
        self.datasets.differs.connect(self.differs.append)
        self.library.altered.connect(self.changes.append)

    def open(self, folder: Path) -> None:
        self.datasets.open(folder)
        self.settle()

    def look(self, whole: bool = True) -> None:
        self.datasets.refresh(whole=whole)
        self.settle()

    def settle(self) -> None:
        """Wait until no scan and no reading of headers is in progress."""
        datasets = self.datasets._open.values()
        self.desk.until(lambda: not any(each.scanning or each.sizing for each in datasets))

    def names(self) -> list[str]:
        return [picture.name for picture in self.library.images.values()]

    def __getitem__(self, name: str) -> LibraryImage:
        return next(picture for picture in self.library.images.values() if picture.name == name)


def picture(path: Path, size: tuple[int, int] = (40, 30), **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "teal").save(path, **more)
    return path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
