"""Wording, order and one-click fixes of the health findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.core.edits.bulk import add_tags, exclude, remove_tags
from app.core.edits.history import Edit
from app.core.library import Folder, LibraryImage, ValueChange
from app.core.tags.splitting import Lines, split_tags
from trainer.dataset.findings import RULES, Rule, Severity, worded
from trainer.dataset.findings import rule_of as trainer_rule_of
from trainer.errors import ImpastoError

Action = Literal["crop", "mask", "convert", "look", "write"]
"""Tool that the window opens for a finding that no automatic edit can fix."""

APP_RULES: Mapping[str, Rule] = {
    "image.unusable": Rule(
        "error",
        "{images} cannot be used: damaged, empty, too large or unreadable.",
        "Save them again from their source, or exclude them.",
    ),
    "duplicate.exact": Rule(
        "warning",
        "{images} identical to another one.",
        "Keep one of each; use repeats to train on an image more often.",
    ),
    "duplicate.near": Rule(
        "warning",
        "{images} almost identical to another one.",
        "Keep one of each pair: duplicates are memorized.",
    ),
    "tag.one_letter": Rule(
        "warning",
        "{images} with a tag of a single character, usually a typo.",
        "Remove or correct these tags.",
    ),
    "tag.rare": Rule(
        "info",
        "{images} with a tag that no other image has.",
        "Look for other spellings: a tag that appears only once is barely learned.",
    ),
    "folder.unbalanced": Rule(
        "warning",
        "{images} in folders that are trained on far less often than others.",
        "Increase the repeats of these folders so that all are learned equally.",
    ),
}
# The trainer's remedies name job keys; these name what the user can do in the window instead.
_REMEDIES: Mapping[str, str] = {
    "file.outside": "Copy the files into the dataset, or open the folder they point to first.",
    "image.tiny": "Use larger images.",
    "image.cropped": "Choose the part to keep so that the subject stays inside.",
    "image.excluded": "They stay on disk; you can include them again at any time.",
    "caption.long": "Shorten it or raise the token limit: text that is cut off is not learned.",
    "caption.missing": "Write captions, or give the folder a trigger.",
    "caption.empty": "Write captions, or give the folder a trigger.",
}
_ACTIONS: Mapping[str, Action] = {
    "image.cropped": "crop",
    "mask.missing": "mask",
    "caption.missing": "write",
    "caption.empty": "write",
    "caption.words": "write",
    "caption.cp1252": "convert",
    "caption.utf-16": "convert",
}
MAX_LISTED = 20
"""Maximum number of orphan files whose paths the tooltip lists."""
_NAMED = 3
_ORDER: Mapping[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One finding: its code, wording, images and fix."""

    code: str
    severity: Severity
    sentence: str
    remedy: str
    ids: Set[int]
    """Ids of the affected images. The set is updated with the library; do not modify it."""
    fix_title: str = ""
    fix: Callable[[], Edit] | None = None
    """Function that returns the edit that fixes the finding. It may take a second, so call it on a worker."""
    action: Action | None = None
    path_tooltip: str = ""
    """Full path of the only affected image, or the full paths of the orphan files, one per line."""
    files: Sequence[Path] = ()
    """The first MAX_LISTED orphan files, if the finding is about files without an image."""

    @property
    def query(self) -> str:
        """Return the filter query that finds the affected images."""
        return f"problem:{name_of(self.code, self.severity)}"


def name_of(code: str, severity: Severity) -> str:
    """Return the name of a finding in `problem:` queries; a bare `problem:` does not match "info." names."""
    return f"info.{code}" if severity == "info" else code


def make_finding(
    code: str, ids: Set[int], fix: tuple[str, Callable[[], Edit]] | None, alone: LibraryImage | None = None
) -> HealthFinding:
    """Return the finding for images with this code; if only one is affected (`alone`), show its own problem."""
    rule = rule_of(code)
    sentence, place = worded(rule, len(ids)), ""
    if alone and alone.problem:
        place = str(alone.path)
        sentence = alone.problem.replace(place, str(alone.path.relative_to(alone.folder.root)))
    title, make = fix or ("", None)
    remedy = _REMEDIES.get(code, rule.remedy)
    return HealthFinding(code, rule.severity, sentence, remedy, ids, title, make, _ACTIONS.get(code), place)


def orphan_files_finding(code: str, count: int, files: Sequence[Path]) -> HealthFinding:
    """Return the finding for `count` orphan files; `files` are the first of them."""
    rule = rule_of(code)
    names = ", ".join(path.name for path in files[:_NAMED])
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    sentence = f"{worded(rule, count).removesuffix('.')}: {names}{more}."
    place = "\n".join(map(str, files))
    return HealthFinding(
        code, rule.severity, sentence, rule.remedy, frozenset(), path_tooltip=place, files=tuple(files)
    )


def inspection_failed_finding(fault: ImpastoError) -> HealthFinding:
    """Return the finding for images that were not inspected because no worker process could be started."""
    return HealthFinding(fault.code, "error", fault.sentence, fault.remedy, frozenset(), action="look")


def notes_finding(fault: ImpastoError) -> HealthFinding:
    """Return the finding for a folder whose notes cannot be read; training refuses such a folder."""
    return HealthFinding(fault.code, "error", fault.sentence, fault.remedy, frozenset())


def remedy_of(code: str) -> str:
    """Return the remedy for a trainer finding, worded for the window."""
    return _REMEDIES.get(code) or trainer_rule_of(code).remedy


def rule_of(code: str) -> Rule:
    """Return the severity and wording of a finding code."""
    return APP_RULES.get(code) or RULES[code]


def sort_findings(findings: Sequence[HealthFinding]) -> tuple[HealthFinding, ...]:
    """Return findings sorted by severity, then by the number of affected images or files."""
    return tuple(sorted(findings, key=lambda item: (_ORDER[item.severity], -len(item.ids or item.files), item.code)))


def keep_best(groups: Iterable[Sequence[LibraryImage]]) -> Edit:
    """Exclude all but the best of each group: highest rating, then most pixels, then most bytes, then path."""
    others = [image for group in groups for image in sorted(group, key=_sort_key)[1:]]
    return exclude(others, True)


def _sort_key(image: LibraryImage) -> tuple[int, int, int, str]:
    pixels = (image.width or 0) * (image.height or 0)
    return -(image.rating or 0), -pixels, -image.bytes, str(image.path)


def put_trigger_first(images: Iterable[LibraryImage], lines: Lines = "caption") -> Edit:
    """Put each folder's trigger word at the front of the captions that do not contain it."""
    by_folder: dict[Folder, list[LibraryImage]] = {}
    for image in images:
        by_folder.setdefault(image.folder, []).append(image)
    changes: list[ValueChange] = []
    for folder, members in by_folder.items():
        if folder.trigger:
            changes += add_tags(members, [folder.trigger.strip()], 0, lines).changes
    return Edit(f"Put the trigger word first in {_counted(len(changes), 'caption')}", tuple(changes))


def remove_single_letters(images: Sequence[LibraryImage], lines: Lines = "caption") -> Edit:
    """Remove tags of one character."""
    tags = sorted({tag for image in images for tag in split_tags(image.caption, lines) if len(tag) == 1})
    edit = remove_tags(images, tags, lines)
    return Edit(f"Remove tags of one letter from {_counted(len(edit.changes), 'caption')}", edit.changes)


def connected(pairs: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Return the connected components of the graph whose edges are the image pairs."""
    groups, reached = list[list[int]](), set[int]()
    for start in pairs:
        if start in reached:
            continue
        group, pending = [], [start]
        reached.add(start)
        while pending:
            image = pending.pop()
            group.append(image)
            new = [other for other in pairs.get(image, ()) if other not in reached]
            reached.update(new)
            pending += new
        groups.append(sorted(group))
    return groups


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
