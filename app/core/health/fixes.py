"""What one click does about a finding, as edits that can be taken back. They may run on a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from app.core.culling import exclude
from app.core.edits.bulk import add_tags, remove_tags
from app.core.edits.edit import Edit
from app.core.pictures import Change, Folder, Picture
from app.core.tags.splitting import Lines, split_tags


def keep_best(groups: Iterable[Sequence[Picture]]) -> Edit:
    """Exclude all but the best of each group of copies: by stars, then pixels, then bytes, then the first by name."""
    others = [picture for group in groups for picture in sorted(group, key=_worth)[1:]]
    return exclude(others, True)


def _worth(picture: Picture) -> tuple[int, int, int, str]:
    pixels = (picture.width or 0) * (picture.height or 0)
    return -(picture.rating or 0), -pixels, -picture.bytes, str(picture.path)


def put_trigger_first(pictures: Iterable[Picture], lines: Lines = "caption") -> Edit:
    """Write each folder's trigger before the captions that lack it."""
    by_folder: dict[Folder, list[Picture]] = {}
    for picture in pictures:
        by_folder.setdefault(picture.folder, []).append(picture)
    changes: list[Change] = []
    for folder, inside in by_folder.items():
        if folder.trigger:
            changes += add_tags(inside, [folder.trigger.strip()], 0, lines).changes
    return Edit(f"Put the trigger first in {_counted(len(changes), 'caption')}", tuple(changes))


def remove_single_letters(pictures: Sequence[Picture], lines: Lines = "caption") -> Edit:
    """Remove tags of one character."""
    tags = sorted({tag for picture in pictures for tag in split_tags(picture.caption, lines) if len(tag) == 1})
    edit = remove_tags(pictures, tags, lines)
    return Edit(f"Remove tags of one letter from {_counted(len(edit.changes), 'caption')}", edit.changes)


def connected(pairs: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return the groups that pairs of pictures make, directly or through others."""
    groups, reached = list[list[int]](), set[int]()
    for start in pairs:
        if start in reached:
            continue
        group, ahead = [], [start]
        reached.add(start)
        while ahead:
            picture = ahead.pop()
            group.append(picture)
            new = [other for other in pairs.get(picture, ()) if other not in reached]
            reached.update(new)
            ahead += new
        groups.append(sorted(group))
    return groups


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
