"""What is wrong or doubtful in a dataset, each with its remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "info"]
"""error: left out or wrong as it stands; warning: used, but doubtful; info: good to know."""
CROP_LOSS = 0.2
"""Pictures that lose more than this share of their area to the bucket's shape are reported."""
_NAMED = 4
_NAMED_GROUPS = 8
_MOST_OF_A_KIND = 20
_ORDER: Mapping[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of thing found: `code` for programs, sentence and remedy for people, and the files concerned."""

    code: str
    sentence: str
    remedy: str
    paths: tuple[Path, ...] = ()
    severity: Severity = "warning"


class Rule(NamedTuple):
    """How one kind of mark is worded."""

    severity: Severity
    sentence: str
    """{pictures} and {files} become the count with its word."""
    remedy: str


RULES: Mapping[str, Rule] = {
    "file.outside": Rule(
        "error",
        "{files} left out: links that lead out of the dataset.",
        "Copy the files into the dataset, or add the folder that they lead to to dataset.linked_folders.",
    ),
    "picture.tiny": Rule(
        "error",
        "{pictures} left out: too small even for the smallest bucket.",
        "Use larger pictures, or raise recipe.pictures.max_upscale.",
    ),
    "picture.small": Rule(
        "warning",
        "{pictures} with fewer pixels than the resolution asks for: enlarged, or trained in a smaller bucket.",
        "Use larger originals; a good upscaler helps too. A few such pictures do no harm.",
    ),
    "picture.cropped": Rule(
        "warning",
        f"{{pictures}} losing more than {CROP_LOSS:.0%} of the area to the bucket's shape.",
        "Crop them yourself so that the subject stays in, or raise recipe.pictures.bucket_max.",
    ),
    "picture.held_out_near": Rule(
        "warning",
        "{pictures} for validation nearly the same as pictures that are learned: the held-out loss will flatter.",
        "Hold out other pictures, or let dataset.validation_share choose them.",
    ),
    "picture.same_stem": Rule(
        "warning",
        "{pictures} sharing their name, but for the ending, with another picture: they share one caption file.",
        "Rename them so that each has a caption file of its own.",
    ),
    "picture.twice": Rule(
        "warning",
        "{pictures} listed twice, because folders of the job overlap.",
        "Name each folder once; use repeats to show pictures more often.",
    ),
    "picture.profile": Rule(
        "warning",
        "{pictures} with a broken colour profile: the colours are taken as sRGB.",
        "Save them again as sRGB if the colours look wrong elsewhere too.",
    ),
    "picture.other_kind": Rule(
        "warning",
        "{files} of picture kinds that are not read.",
        "Save them as PNG, JPEG or WebP.",
    ),
    "picture.misnamed": Rule(
        "info",
        "{pictures} of another kind than the name's ending says; read all the same.",
        "Rename them if other programs stumble over them.",
    ),
    "picture.rotated": Rule(
        "info",
        "{pictures} turned upright as the camera noted (EXIF).",
        "",
    ),
    "picture.animated": Rule(
        "info",
        "{pictures} with several frames or pages: only the first is used.",
        "Save the frame you want as a picture of its own.",
    ),
    "picture.excluded": Rule(
        "info",
        "{pictures} excluded by impasto.jsonl.",
        "",
    ),
    "caption.missing": Rule(
        "warning",
        "{pictures} without a caption: trained with an empty text.",
        "Write NAME.txt beside each picture, or give the folder a trigger or class words.",
    ),
    "caption.empty": Rule(
        "warning",
        "{pictures} with an empty caption: trained with an empty text.",
        "Write the caption, or give the folder a trigger or class words.",
    ),
    "caption.words": Rule(
        "info",
        "{pictures} without a caption: trained with the folder's trigger or class words.",
        "Write captions if the pictures show more than that.",
    ),
    "caption.long": Rule(
        "warning",
        "{pictures} with a caption longer than what is read: its end is cut.",
        "Shorten it, or raise recipe.token_chunks.",
    ),
    "caption.clash": Rule(
        "warning",
        "{pictures} with several captions that differ (.txt, .caption, metadata.jsonl): the first of these is used.",
        "Keep one of them.",
    ),
    "caption.cp1252": Rule(
        "warning",
        "{files} not written in UTF-8: read as Windows' cp1252, and left as they are.",
        "Check the letters in the captions shown, and save the files as UTF-8.",
    ),
    "caption.utf-16": Rule(
        "warning",
        "{files} written in UTF-16: read as such, and left as they are.",
        "Save them as UTF-8; other programs will stumble.",
    ),
    "caption.orphan": Rule(
        "info",
        "{files} that could be captions, with no picture of that name.",
        "Rename or remove them if a picture should have had that caption.",
    ),
    "metadata.orphan": Rule(
        "warning",
        "{files} named in metadata.jsonl that do not exist.",
        "Put them back, or remove their lines.",
    ),
    "trigger.absent": Rule(
        "info",
        "{pictures} whose caption does not hold the trigger: it is put first.",
        "",
    ),
    "mask.missing": Rule(
        "info",
        "{pictures} without a mask: all of the image is trained.",
        "Paint a mask where only a part should count.",
    ),
    "mask.orphan": Rule(
        "warning",
        "{files} meant as masks, with no picture of that name.",
        "Rename the mask to NAME-masklabel.png after its picture, or remove it.",
    ),
    "mask.unused": Rule(
        "warning",
        "{files} ignored: dataset.masks says that mask files are not used.",
        'Set dataset.masks = "auto" to use them, or remove them.',
    ),
    "mask.size": Rule(
        "warning",
        "{files} of another shape than their picture: stretched over it.",
        "Save each mask in the size of its picture.",
    ),
    "bucket.lonely": Rule(
        "info",
        "{pictures} in buckets too small to fill a batch: batched with other shapes, which is a little slower.",
        "",
    ),
    "folder.many_repeats": Rule(
        "warning",
        "{folders} whose number, read as repeats, is very large.",
        "Set repeats for the folder in the job if the number means something else.",
    ),
}


def word_marks(marks: Mapping[str, Sequence[Path]]) -> list[Finding]:
    """Return one finding for each kind of mark, with all files concerned."""
    return [_worded(code, paths) for code, paths in marks.items() if paths]


def word_copies(groups: Sequence[Sequence[Path]], *, exact: bool) -> list[Finding]:
    """Return a finding for each group of pictures that are the same, or nearly; one for all where groups are many."""
    code, how = ("picture.same", "exactly the same") if exact else ("picture.near", "nearly the same")
    remedy = "Remove all but one, or use repeats." if exact else "Keep the best of each; many teach that one picture."
    if len(groups) > _NAMED_GROUPS:
        paths = tuple(path for group in groups for path in group)
        return [Finding(code, f"{len(paths)} pictures in {len(groups)} groups that are {how}.", remedy, paths)]
    return [Finding(code, f"{_listed(group)} are {how}.", remedy, tuple(group)) for group in groups]


def _listed(paths: Sequence[Path]) -> str:
    if len(paths) > _NAMED:
        return ", ".join(path.name for path in paths[:_NAMED]) + f" and {len(paths) - _NAMED} more pictures"
    return ", ".join(path.name for path in paths[:-1]) + f" and {paths[-1].name}"


def by_severity(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings with errors first, then warnings, and no more than 20 of a kind.

    The order does not depend on how they were found.
    """
    ordered = sorted(findings, key=lambda finding: (_ORDER[finding.severity], finding.code, finding.paths))
    kinds = [list(group) for _, group in groupby(ordered, key=lambda finding: (finding.severity, finding.code))]
    return tuple(finding for kind in kinds for finding in _limited(kind))


def _limited(kind: Sequence[Finding]) -> Sequence[Finding]:
    """Return the first findings of one kind, and one for all others, with their files."""
    shown, rest = kind[:_MOST_OF_A_KIND], kind[_MOST_OF_A_KIND:]
    if len(rest) <= 1:
        return kind
    paths = tuple(dict.fromkeys(path for finding in rest for path in finding.paths))
    first = rest[0]
    sentence = f"{len(rest):,} more findings of the same kind as the {_MOST_OF_A_KIND} before."
    return [*shown, Finding(first.code, sentence, first.remedy, paths, first.severity)]


def worded(rule: Rule, count: int) -> str:
    """Return a rule's sentence for so many pictures, files or folders."""
    plural = "" if count == 1 else "s"
    counts = {noun + "s": f"{count} {noun}{plural}" for noun in ("picture", "file", "folder")}
    return rule.sentence.format(**counts)


def _worded(code: str, paths: Sequence[Path]) -> Finding:
    rule = RULES[code]
    return Finding(code, worded(rule, len(paths)), rule.remedy, tuple(paths), rule.severity)
