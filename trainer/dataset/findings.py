"""Problems found in a dataset, each with a sentence and a remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainer.errors import DatasetError

Severity = Literal["error", "warning", "info"]
"""error: a file cannot be used; warning: it is used, but probably not as intended; info: good to know."""
CROP_LOSS = 0.2
"""Cropping that removes more than this share of an image's area is reported."""
_NAMED = 4
_NAMED_GROUPS = 8
_MOST_OF_A_KIND = 20
_ORDER: Mapping[Severity, int] = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem found in a dataset: its code and values, and the files concerned."""

    code: str
    values: Mapping[str, Any] = field(hash=False)
    """Counts, names and reasons that the sentence contains, as plain data."""
    paths: tuple[Path, ...] = ()
    severity: Severity = "warning"

    @property
    def sentence(self) -> str:
        """Return the sentence that describes the problem."""
        return sentence_of(self.code, self.values)

    @property
    def remedy(self) -> str:
        """Return what to do about the problem; empty if nothing needs to be done."""
        return rule_of(self.code).remedy


class Rule(NamedTuple):
    """Severity, sentence and remedy of one kind of finding."""

    severity: Severity
    sentence: str
    """Template in which {images}, {files} and {folders} become the count with its noun, such as "3 images"."""
    remedy: str


RULES: Mapping[str, Rule] = {
    "file.outside": Rule(
        "error",
        "{files} left out: links that point outside the dataset.",
        "Copy the files into the dataset, or add their folder to dataset.linked_folders.",
    ),
    "image.tiny": Rule(
        "error",
        "{images} left out: too small for the smallest bucket.",
        "Use larger images, or raise recipe.images.max_upscale.",
    ),
    "image.small": Rule(
        "warning",
        "{images} smaller than the training resolution: enlarged, or trained in a smaller bucket.",
        "Use larger originals or a good upscaler. A few such images do no harm.",
    ),
    "image.cropped": Rule(
        "warning",
        f"{{images}} cropped by more than {CROP_LOSS:.0%} to fit a bucket.",
        "Crop them yourself so that the subject is not cut off, or raise recipe.images.bucket_max.",
    ),
    "image.held_out_near": Rule(
        "warning",
        "{images} for validation that are nearly identical to training images: the validation loss will look too good.",
        "Hold out other images, or let dataset.validation_share choose them.",
    ),
    "image.same_stem": Rule(
        "warning",
        "{images} with the same name as another except for the extension: they share one caption file.",
        "Rename them so that each has its own caption file.",
    ),
    "image.twice": Rule(
        "warning",
        "{images} listed twice, because folders of the job overlap.",
        "List each folder once; use repeats to train images more often.",
    ),
    "image.profile": Rule(
        "warning",
        "{images} with a broken color profile: treated as sRGB.",
        "Save them again as sRGB if the colors look wrong in other programs too.",
    ),
    "image.other_kind": Rule(
        "warning",
        "{files} in image formats that are not supported.",
        "Save them as PNG, JPEG or WebP.",
    ),
    "image.misnamed": Rule(
        "info",
        "{images} with the wrong file extension; read anyway.",
        "Rename them if other programs cannot open them.",
    ),
    "image.rotated": Rule(
        "info",
        "{images} rotated as recorded by the camera (EXIF).",
        "",
    ),
    "image.animated": Rule(
        "info",
        "{images} with several frames or pages: only the first is used.",
        "Save the frame you want as a separate image.",
    ),
    "image.excluded": Rule(
        "info",
        "{images} you excluded (impasto.jsonl).",
        "",
    ),
    "caption.missing": Rule(
        "warning",
        "{images} without a caption: trained with an empty caption.",
        "Add NAME.txt next to each image, or set a trigger word or class words for the folder.",
    ),
    "caption.empty": Rule(
        "warning",
        "{images} with an empty caption.",
        "Write the caption, or set a trigger word or class words for the folder.",
    ),
    "caption.words": Rule(
        "info",
        "{images} without a caption: trained with the folder's trigger word or class words.",
        "Write captions if the images show more than that.",
    ),
    "caption.long": Rule(
        "warning",
        "{images} with a caption above the token limit: its end is cut off.",
        "Shorten it, or raise recipe.token_chunks.",
    ),
    "caption.weights": Rule(
        "info",
        "{images} with weights such as (tag:1.2) in the caption: trained as plain text.",
        "Set recipe.weighted_captions = true to use the weights, or remove them.",
    ),
    "caption.brackets": Rule(
        "info",
        "{images} with (tag) or [tag] in the caption: read as weights of 1.1 and 0.91.",
        "Put a backslash before brackets that are part of a tag, as in \\(series\\).",
    ),
    "caption.clash": Rule(
        "warning",
        "{images} with several different captions (.txt, .caption, metadata.jsonl): the first of these is used.",
        "Keep one of them.",
    ),
    "caption.cp1252": Rule(
        "warning",
        "{files} not in UTF-8: read as Windows-1252 and left unchanged.",
        "Check the captions for wrong letters, and save the files as UTF-8.",
    ),
    "caption.utf-16": Rule(
        "warning",
        "{files} in UTF-16: read correctly and left unchanged.",
        "Save them as UTF-8; other programs may not read them.",
    ),
    "caption.orphan": Rule(
        "info",
        "{files} that could be captions but match no image's name.",
        "Rename them if they belong to an image, or remove them.",
    ),
    "metadata.orphan": Rule(
        "warning",
        "{files} named in metadata.jsonl that do not exist.",
        "Put them back, or remove their lines.",
    ),
    "trigger.absent": Rule(
        "info",
        "{images} without the trigger word in the caption.",
        "Training adds it at the front. Write it into the captions if other programs should see it.",
    ),
    "mask.missing": Rule(
        "info",
        "{images} without a mask: the whole image is trained.",
        "Paint a mask where only part of the image should count.",
    ),
    "mask.orphan": Rule(
        "warning",
        "{files} that look like masks but match no image's name.",
        "Name the mask like its image, next to it as NAME-masklabel.png, or remove it.",
    ),
    "mask.unused": Rule(
        "warning",
        "{files} ignored: the dataset or its folder turns mask files off.",
        'Set its masks to "auto" to use them, or remove them.',
    ),
    "mask.size": Rule(
        "warning",
        "{files} with a different aspect ratio than the image: stretched to fit.",
        "Save each mask at the same size as its image.",
    ),
    "bucket.lonely": Rule(
        "info",
        "{images} in buckets too small to fill a batch: batched with other shapes, which is a little slower.",
        "",
    ),
    "folder.many_repeats": Rule(
        "warning",
        "{folders} with a very large number in the name, which is read as repeats.",
        "Set repeats for the folder in the job if the number means something else.",
    ),
}


COPIES: Mapping[str, Rule] = {
    "image.same": Rule("warning", "{which} are exactly the same.", "Remove all but one, or use repeats."),
    "image.near": Rule("warning", "{which} are nearly the same.", "Keep one of each; duplicates get memorized."),
}
FILE_FAULTS: Mapping[str, Rule] = {
    "image.too_large": Rule(
        "error",
        "{file} has {width}×{height} pixels ({megapixels:.0f} megapixels), more than the {limit:g} megapixels that are "
        "allowed.",
        "Make the image smaller, or raise dataset.max_megapixels if it is meant to be that large.",
    ),
    "image.missing": Rule("error", "{file} does not exist.", "Put the image back, or check the dataset again."),
    "image.unusable": Rule("error", "{file} cannot be used: {reason}.", "Move it out of the dataset's folder."),
    "image.forbidden": Rule("error", "You don't have permission to read {file}.", "Change the file's permissions."),
    "image.empty": Rule("error", "{file} is empty (0 bytes).", "Copy the image again, or remove it."),
    "image.jpeg_xl": Rule(
        "error",
        "{file} is a JPEG XL image, which cannot be read here.",
        "Save it as PNG, or install the Python package pillow-jxl-plugin.",
    ),
    "image.unreadable": Rule(
        "error",
        "{file} is not an image in a format that can be read.",
        "Save it as PNG, JPEG or WebP, or remove it from the folder.",
    ),
    "image.damaged": Rule(
        "error",
        "{file} is damaged or cut short ({reason}).",
        "Save the image again from its source, or remove it from the folder.",
    ),
    "image.hangs": Rule(
        "error",
        "{file} could not be decoded within {seconds:g} seconds.",
        "Save the image again from its source, or remove it.",
    ),
    "image.crashes": Rule(
        "error",
        "{file} crashes the decoder.",
        "Remove it, and do not open it in other programs if you do not trust it.",
    ),
    "caption.unreadable": Rule(
        "error", "{file} is not used as a caption: {reason}.", "Write the caption again as plain text."
    ),
    "metadata.damaged": Rule("error", "In {file}, {reason}.", "Fix that line."),
}
"""Problems with single files; {file} is the full path."""


def rule_of(code: str) -> Rule:
    """Return the rule for a finding's code; raises KeyError for an unknown code."""
    return RULES.get(code) or COPIES.get(code) or FILE_FAULTS[code]


def sentence_of(code: str, values: Mapping[str, Any]) -> str:
    """Return a finding's sentence; raises KeyError for an unknown code or a missing value."""
    rule = rule_of(code)
    if "more" in values:
        return f"{values['more']:,} more findings like the previous {_MOST_OF_A_KIND}."
    if code in RULES:
        return worded(rule, values["count"])
    if code in COPIES:
        return rule.sentence.format(which=_which(values))
    return rule.sentence.format(**values)


def file_fault(code: str, path: Path, **values: Any) -> DatasetError:
    """Return the DatasetError for a file with one of the `FILE_FAULTS`."""
    values = {"file": str(path), **values}
    return DatasetError(code, sentence_of(code, values), rule_of(code).remedy, values)


def word_marks(marks: Mapping[str, Sequence[Path]]) -> list[Finding]:
    """Return one finding for each code in ``marks``, with all files marked with this code."""
    return [
        Finding(code, {"count": len(paths)}, tuple(paths), RULES[code].severity)
        for code, paths in marks.items()
        if paths
    ]


def word_copies(groups: Sequence[Sequence[Path]], *, exact: bool) -> list[Finding]:
    """Return a finding for each group of identical or similar images, or a single one for many groups."""
    code = "image.same" if exact else "image.near"
    if len(groups) > _NAMED_GROUPS:
        paths = tuple(path for group in groups for path in group)
        return [Finding(code, {"groups": len(groups), "count": len(paths)}, paths)]
    return [
        Finding(code, {"names": [path.name for path in group[:_NAMED]], "count": len(group)}, tuple(group))
        for group in groups
    ]


def _which(values: Mapping[str, Any]) -> str:
    """Return text that states which images are copies: their names, or the numbers of images and groups."""
    if "groups" in values:
        return f"{values['count']} images in {values['groups']} groups"
    names, rest = values["names"], values["count"] - len(values["names"])
    if rest:
        return f"{', '.join(names)} and {rest} more {'image' if rest == 1 else 'images'}"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def by_severity(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings with errors first, then warnings, and at most 20 per kind.

    The result does not depend on the order of ``findings``.
    """
    ordered = sorted(findings, key=lambda finding: (_ORDER[finding.severity], finding.code, finding.paths))
    kinds = [list(group) for _, group in groupby(ordered, key=lambda finding: (finding.severity, finding.code))]
    return tuple(finding for kind in kinds for finding in _limited(kind))


def _limited(kind: Sequence[Finding]) -> Sequence[Finding]:
    """Return the first findings of one kind, and one finding that stands for all others and lists their files."""
    shown, rest = kind[:_MOST_OF_A_KIND], kind[_MOST_OF_A_KIND:]
    if len(rest) <= 1:
        return kind
    paths = tuple(dict.fromkeys(path for finding in rest for path in finding.paths))
    first = rest[0]
    return [*shown, Finding(first.code, {"more": len(rest)}, paths, first.severity)]


def worded(rule: Rule, count: int) -> str:
    """Return a rule's sentence for ``count`` images, files or folders."""
    plural = "" if count == 1 else "s"
    counts = {noun + "s": f"{count} {noun}{plural}" for noun in ("image", "file", "folder")}
    return rule.sentence.format(**counts)
