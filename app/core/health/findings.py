"""What was found, in words, and what one click can do about it."""

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
"""What the user can be led to, where no edit can fix it."""

OURS: Mapping[str, Rule] = {
    "picture.unusable": Rule(
        "error",
        "{images} cannot be used: damaged, empty, too large or unreadable.",
        "Save them again from their source, or exclude them.",
    ),
    "duplicate.exact": Rule(
        "warning",
        "{images} identical to another one.",
        "Keep one of each; use repeats to show an image more often.",
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
        "Look for other spellings: a tag that appears once is hardly learned.",
    ),
    "folder.unbalanced": Rule(
        "warning",
        "{images} in folders that are shown far less often than another folder.",
        "Increase the repeats of these folders so that all are learned equally.",
    ),
}
# The trainer's words name keys of a job; where the app offers something nearer, it says that.
_REMEDIES: Mapping[str, str] = {
    "file.outside": "Copy the files into the dataset, or open the folder they point to first.",
    "picture.tiny": "Use larger images.",
    "picture.cropped": "Choose the part to keep so that the subject stays inside.",
    "picture.excluded": "They stay on disk; you can include them again at any time.",
    "caption.long": "Shorten it or raise the token limit: text that is cut off is not learned.",
    "trigger.absent": "Training adds it at the front. Write it into the captions if other programs should see it.",
    "caption.missing": "Write captions, or give the folder a trigger.",
    "caption.empty": "Write captions, or give the folder a trigger.",
}
_ACTIONS: Mapping[str, Action] = {
    "picture.cropped": "crop",
    "mask.missing": "mask",
    "caption.missing": "write",
    "caption.empty": "write",
    "caption.words": "write",
    "caption.cp1252": "convert",
    "caption.utf-16": "convert",
}
LISTED = 20
"""Of so many files that belong to no picture the tip tells where they lie."""
_NAMED = 3
_ORDER: Mapping[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """One kind of thing that was found."""

    code: str
    severity: Severity
    sentence: str
    remedy: str
    ids: Set[int]
    """The pictures concerned, as they are now: this set changes with the library and is not to be changed."""
    fix_title: str = ""
    fix: Callable[[], Edit] | None = None
    """Works out what mends it; may take a second, so let a worker call it."""
    action: Action | None = None
    place: str = ""
    """The whole path of the one picture that the sentence names shortly."""
    files: Sequence[Path] = ()
    """The first LISTED of the files concerned, where they belong to no picture."""

    @property
    def query(self) -> str:
        """Return what the filter asks for to show these pictures."""
        return f"problem:{name_of(self.code, self.severity)}"


def name_of(code: str, severity: Severity) -> str:
    """Return what `problem:` asks for; what is only good to know has a name that a bare `problem:` passes over."""
    return f"info.{code}" if severity == "info" else code


def found(
    code: str, ids: Set[int], fix: tuple[str, Callable[[], Edit]] | None, alone: LibraryImage | None = None
) -> HealthFinding:
    """Return the finding for pictures with this code; of one that is `alone`, its own problem is the sentence."""
    rule = rule_of(code)
    sentence, place = worded(rule, len(ids)), ""
    if alone and alone.problem:
        place = str(alone.path)
        sentence = alone.problem.replace(place, str(alone.path.relative_to(alone.folder.root)))
    title, make = fix or ("", None)
    remedy = _REMEDIES.get(code, rule.remedy)
    return HealthFinding(code, rule.severity, sentence, remedy, ids, title, make, _ACTIONS.get(code), place)


def of_files(code: str, count: int, files: Sequence[Path]) -> HealthFinding:
    """Return the finding for so many files that belong to no picture, of which these are the first."""
    rule = rule_of(code)
    names = ", ".join(path.name for path in files[:_NAMED])
    more = f" and {count - _NAMED} more" if count > _NAMED else ""
    sentence = f"{worded(rule, count).removesuffix('.')}: {names}{more}."
    place = "\n".join(map(str, files))
    return HealthFinding(code, rule.severity, sentence, rule.remedy, frozenset(), place=place, files=tuple(files))


def unseen(fault: ImpastoError) -> HealthFinding:
    """Return the finding that pictures could not be looked at, for a reason that is none of theirs."""
    return HealthFinding(fault.code, "error", fault.sentence, fault.remedy, frozenset(), action="look")


def of_notes(fault: ImpastoError) -> HealthFinding:
    """Return the finding that the notes of a folder cannot be read, for which training refuses the folder."""
    return HealthFinding(fault.code, "error", fault.sentence, fault.remedy, frozenset())


def remedy_of(code: str) -> str:
    """Return what to do about a finding of the trainer, in words for the window."""
    return _REMEDIES.get(code) or trainer_rule_of(code).remedy


def rule_of(code: str) -> Rule:
    """Return how a code is worded."""
    return OURS.get(code) or RULES[code]


def in_order(findings: Sequence[HealthFinding]) -> tuple[HealthFinding, ...]:
    """Return errors first, then what concerns most pictures."""
    return tuple(sorted(findings, key=lambda one: (_ORDER[one.severity], -len(one.ids or one.files), one.code)))


def keep_best(groups: Iterable[Sequence[LibraryImage]]) -> Edit:
    """Exclude all but the best of each group of copies: by stars, then pixels, then bytes, then the first by name."""
    others = [image for group in groups for image in sorted(group, key=_worth)[1:]]
    return exclude(others, True)


def _worth(image: LibraryImage) -> tuple[int, int, int, str]:
    pixels = (image.width or 0) * (image.height or 0)
    return -(image.rating or 0), -pixels, -image.bytes, str(image.path)


def put_trigger_first(images: Iterable[LibraryImage], lines: Lines = "caption") -> Edit:
    """Write each folder's trigger before the captions that lack it."""
    by_folder: dict[Folder, list[LibraryImage]] = {}
    for image in images:
        by_folder.setdefault(image.folder, []).append(image)
    changes: list[ValueChange] = []
    for folder, inside in by_folder.items():
        if folder.trigger:
            changes += add_tags(inside, [folder.trigger.strip()], 0, lines).changes
    return Edit(f"Put the trigger first in {_counted(len(changes), 'caption')}", tuple(changes))


def remove_single_letters(images: Sequence[LibraryImage], lines: Lines = "caption") -> Edit:
    """Remove tags of one character."""
    tags = sorted({tag for image in images for tag in split_tags(image.caption, lines) if len(tag) == 1})
    edit = remove_tags(images, tags, lines)
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
            image = ahead.pop()
            group.append(image)
            new = [other for other in pairs.get(image, ()) if other not in reached]
            reached.update(new)
            ahead += new
        groups.append(sorted(group))
    return groups


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
