"""The values that stand in impasto.jsonl: ratings, exclusions and crops of pictures, facts of folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.core.edits.save_state import SaveRequest
from app.core.edits.writer import Neighbours
from app.core.library import Value
from trainer.dataset.sidecar import FILE_NAME, Sidecar, read_sidecar, sidecar_text
from trainer.errors import DatasetError, plain_reason
from trainer.protocol.reading import read_bytes


@dataclass(frozen=True, slots=True)
class Notes:
    """The notes of one folder, and the bytes that they were read from."""

    file: Path
    data: bytes | None
    """None where there is no file."""
    sidecar: Sidecar

    def value(self, wish: SaveRequest) -> Value:
        """Return what stands there for a wish's value."""
        holder = self.sidecar.folder if wish.key.of_folder else self.sidecar.of(wish.key.path.name)
        value: Value = getattr(holder, wish.key.field)
        return value

    def with_values(self, wishes: Sequence[SaveRequest]) -> bytes:
        """Return the bytes that hold what is wished, all else as it is; raises DatasetError for impossible values."""
        pictures: dict[str, dict[str, object]] = {}
        facts: dict[str, object] = {}
        for wish in wishes:
            whose = facts if wish.key.of_folder else pictures.setdefault(wish.key.path.name, {})
            whose[wish.key.field] = wish.desired
        return sidecar_text(_changed(self.sidecar, facts, pictures)).encode("utf-8")


def read_notes(folder: Path, around: Neighbours) -> Notes:
    """Return a folder's notes; raises DatasetError when they are damaged or lead out of the dataset, and OSError."""
    file = folder / FILE_NAME
    around.require_inside(str(file))
    data = _bytes(file)
    sidecar = read_sidecar(folder)
    while (now := _bytes(file)) != data:  # written between the two looks
        data, sidecar = now, read_sidecar(folder)
    return Notes(file, data, sidecar)


def _bytes(file: Path) -> bytes | None:
    try:
        return read_bytes(file, "notes")
    except FileNotFoundError:
        return None


def _changed(sidecar: Sidecar, facts: Mapping[str, object], pictures: Mapping[str, Mapping[str, object]]) -> Sidecar:
    try:
        return (sidecar.with_folder(**facts) if facts else sidecar).with_pictures(pictures)
    except ValueError as fault:  # pydantic's errors are ValueErrors
        raise DatasetError(
            "save.value", f"A note cannot be kept: {plain_reason(fault)}.", "Undo that change, or choose another value."
        ) from fault
