"""What is wrong or doubtful in a dataset, each with its remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainer.errors import DatasetError

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
    """One problem of a dataset: its code with values, and the files concerned."""

    code: str
    values: Mapping[str, Any] = field(hash=False)
    """Counts, names and reasons that its sentence is made of, as plain data."""
    paths: tuple[Path, ...] = ()
    severity: Severity = "warning"

    @property
    def sentence(self) -> str:
        """Return what was found."""
        return sentence_of(self.code, self.values)

    @property
    def remedy(self) -> str:
        """Return what to do about it; empty where nothing needs to be done."""
        return rule_of(self.code).remedy


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


COPIES: Mapping[str, Rule] = {
    "picture.same": Rule("warning", "{which} are exactly the same.", "Remove all but one, or use repeats."),
    "picture.near": Rule("warning", "{which} are nearly the same.", "Keep one of each; duplicates get memorized."),
}
FILE_FAULTS: Mapping[str, Rule] = {
    "picture.too_large": Rule(
        "error",
        "{file} has {width}×{height} pixels ({megapixels:.0f} megapixels), more than the {limit:g} megapixels that are "
        "allowed.",
        "Make the image smaller, or raise dataset.max_megapixels if it is meant to be that large.",
    ),
    "picture.missing": Rule("error", "{file} does not exist.", "Put the image back, or check the dataset again."),
    "picture.unusable": Rule("error", "{file} cannot be used: {reason}.", "Move it out of the dataset's folder."),
    "picture.forbidden": Rule("error", "{file} may not be read by this user.", "Change the file's permissions."),
    "picture.empty": Rule("error", "{file} is empty (0 bytes).", "Copy the image again, or remove it."),
    "picture.jpeg_xl": Rule(
        "error",
        "{file} is a JPEG XL image, which cannot be read here.",
        "Save it as PNG, or install the Python package pillow-jxl-plugin.",
    ),
    "picture.unreadable": Rule(
        "error",
        "{file} is not an image in a format that can be read.",
        "Save it as PNG, JPEG or WebP, or remove it from the folder.",
    ),
    "picture.damaged": Rule(
        "error",
        "{file} is damaged or cut short ({reason}).",
        "Save the image again from its source, or remove it from the folder.",
    ),
    "picture.hangs": Rule(
        "error",
        "{file} could not be decoded within {seconds:g} seconds.",
        "Save the image again from its source, or remove it.",
    ),
    "picture.crashes": Rule(
        "error",
        "{file} makes the program that decodes it crash.",
        "Remove it; do not open it in other programs if you do not trust it.",
    ),
    "caption.unreadable": Rule(
        "error", "{file} is not used as a caption: {reason}.", "Write the caption again as plain text."
    ),
    "metadata.damaged": Rule("error", "In {file}, {reason}.", "Correct that line."),
}
"""Problems of single files; {file} is the whole path."""


def rule_of(code: str) -> Rule:
    """Return how a finding with this code is worded; raises KeyError for a code without words."""
    return (RULES.get(code) or COPIES.get(code)) or FILE_FAULTS[code]


def sentence_of(code: str, values: Mapping[str, Any]) -> str:
    """Return the sentence of a finding; raises KeyError for a code without words or a missing value."""
    rule = rule_of(code)
    if "more" in values:
        return f"{values['more']:,} more findings of the same kind as the {_MOST_OF_A_KIND} before."
    if code in RULES:
        return worded(rule, values["count"])
    if code in COPIES:
        return rule.sentence.format(which=_which(values))
    return rule.sentence.format(**values)


def file_fault(code: str, path: Path, **values: Any) -> DatasetError:
    """Return the error for a file with one of the `FILE_FAULTS`."""
    values = {"file": str(path), **values}
    return DatasetError(code, sentence_of(code, values), rule_of(code).remedy, values)


def word_marks(marks: Mapping[str, Sequence[Path]]) -> list[Finding]:
    """Return one finding for each kind of mark, with all files concerned."""
    return [
        Finding(code, {"count": len(paths)}, tuple(paths), RULES[code].severity)
        for code, paths in marks.items()
        if paths
    ]


def word_copies(groups: Sequence[Sequence[Path]], *, exact: bool) -> list[Finding]:
    """Return a finding for each group of images that are the same, or nearly; one for all where groups are many."""
    code = "picture.same" if exact else "picture.near"
    if len(groups) > _NAMED_GROUPS:
        paths = tuple(path for group in groups for path in group)
        return [Finding(code, {"groups": len(groups), "count": len(paths)}, paths)]
    named = ([path.name for path in (group[:_NAMED] if len(group) > _NAMED else group)] for group in groups)
    return [
        Finding(code, {"names": names, "count": len(group)}, tuple(group))
        for names, group in zip(named, groups, strict=True)
    ]


def _which(values: Mapping[str, Any]) -> str:
    """Return which images are the same: their names, or how many in how many groups."""
    if "groups" in values:
        return f"{values['count']} images in {values['groups']} groups"
    names, rest = values["names"], values["count"] - len(values["names"])
    if rest:
        return f"{', '.join(names)} and {rest} more {'image' if rest == 1 else 'images'}"
    return f"{', '.join(names[:-1])} and {names[-1]}"


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
    return [*shown, Finding(first.code, {"more": len(rest)}, paths, first.severity)]


def worded(rule: Rule, count: int) -> str:
    """Return a rule's sentence for so many pictures, files or folders."""
    plural = "" if count == 1 else "s"
    counts = {noun + "s": f"{count} {noun}{plural}" for noun in ("picture", "file", "folder")}
    return rule.sentence.format(**counts)
