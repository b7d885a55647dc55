"""What culling does to pictures and folders, as edits: rating, excluding, including, repeats."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from app.core.edits.edit import Edit
from app.core.pictures import Change, Folder, FolderChange, FolderField, Picture

_FOLDER: tuple[FolderField, ...] = ("repeats", "regularisation", "trigger")


def rate(pictures: Iterable[Picture], rating: int | None) -> Edit:
    """Give pictures a rating, 1 to 5, or take it from them."""
    changes = tuple(Change(one.id, "rating", one.rating, rating) for one in pictures if one.rating != rating)
    verb = f"Rate {rating} of 5" if rating else "Remove the rating"
    return Edit(f"{verb}: {_counted(changes)}", changes)


def exclude(pictures: Iterable[Picture], excluded: bool) -> Edit:
    """Leave pictures out of training, or take them in again."""
    changes = tuple(Change(one.id, "excluded", one.excluded, excluded) for one in pictures if one.excluded != excluded)
    return Edit(f"{'Exclude' if excluded else 'Include'} {_counted(changes)}", changes)


def exclude_others(pictures: Iterable[Picture], kept: Collection[int]) -> Edit:
    """Leave out all pictures but those kept, so that training sees what a filter shows; excluded ones stay so."""
    kept = frozenset(kept)
    edit = exclude((one for one in pictures if one.id not in kept), True)
    return Edit(f"Train only what is shown: {edit.name.lower()}", edit.changes)


def mark_folder(folder: Folder, **facts: str | int | bool | None) -> Edit:
    """Change what holds for all pictures of a folder: repeats, regularisation, trigger."""
    changes = tuple(
        FolderChange(folder, field, getattr(folder, field), facts[field])
        for field in _FOLDER
        if field in facts and facts[field] != getattr(folder, field)
    )
    return Edit(f"Change the folder {folder.path.name}", (), changes)


def _counted(changes: Collection[Change]) -> str:
    return "1 picture" if len(changes) == 1 else f"{len(changes)} pictures"
