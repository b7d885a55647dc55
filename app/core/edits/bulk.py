"""Bulk caption edits: pure functions that return an edit, whose changes also serve as the preview.

The caller chooses the images. Parts of a caption that an edit does not affect stay exactly the same, and images without
a caption file get one only if text is added. The functions may run on a worker: a caption that has changed by the time
the edit is applied is skipped.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol, overload

from app.core.edits.history import Edit
from app.core.library import Folder, FolderChange, FolderField, LibraryImage, ValueChange
from app.core.tags.splitting import (
    JOINT,
    SEPARATOR,
    Lines,
    find_tags,
    is_emoticon,
    join_tags,
    remove_tag,
    replace_tag,
    split_tags,
)
from trainer.errors import ImpastoError

PATIENCE = 1.0
"""Time limit for a pattern, in seconds per caption; ordinary patterns take a few microseconds."""
PATIENCE_IN_ALL = 60.0
"""Time limit for a pattern, in seconds for all captions together."""

Order = Literal["alphabet", "frequency"]
_Rewrite = Callable[[str], str]
_FOLDER: tuple[FolderField, ...] = ("repeats", "regularization", "trigger")
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
# Comparing takes time proportional to the product of both lengths. Longer texts are compared only at both ends.
_MOST_WORDS = 1500


class CaptionSnapshot(Protocol):
    """Object with an image's id and caption: a `LibraryImage`, or an item of a snapshot that a worker reads."""

    @property
    def id(self) -> int:
        """Return the image's id in this session."""

    @property
    def caption(self) -> str | None:
        """Return the caption, or None if the image has no caption file."""


class PatternError(ImpastoError):
    """Raised for an unusable search pattern; `position` is the 0-based index of the error, or None if unknown."""

    def __init__(self, code: str, sentence: str, remedy: str, position: int | None = None) -> None:
        super().__init__(code, sentence, remedy)
        self.position = position


def add_tags(
    images: Iterable[CaptionSnapshot], tags: Sequence[str], at: int | None = None, lines: Lines = "caption"
) -> Edit:
    """Insert tags before index `at`, or append them if it is None; tags already present are not added again."""

    def rewrite(row: str) -> str:
        present = set(split_tags(row))
        new = [tag for tag in dict.fromkeys(tags) if tag not in present]
        return _inserted(row, join_tags(new), at) if new else row

    return _edit(f"Add {_quoted(tags)} to {{}}", images, _by_row(rewrite, lines), makes=True)


def remove_tags(images: Iterable[CaptionSnapshot], tags: Iterable[str], lines: Lines = "caption") -> Edit:
    """Remove tags, each with its comma."""
    gone = list(dict.fromkeys(tags))

    def rewrite(row: str) -> str:
        for piece in reversed(find_tags(row)):  # from the end, so that the earlier positions stay valid
            if piece.tag in gone:
                row = remove_tag(row, piece)
        return row

    return _edit(f"Remove {_quoted(gone)} from {{}}", images, _by_row(rewrite, lines))


def rename_tag(images: Iterable[CaptionSnapshot], old: str, new: str, lines: Lines = "caption") -> Edit:
    """Rename a tag; in captions that already have the new tag, just remove the old one."""

    def rewrite(row: str) -> str:
        present = new in split_tags(row)
        found = find_tags(row)
        for number, piece in reversed(list(enumerate(found))):
            if piece.tag == old:
                first = not present and all(earlier.tag != old for earlier in found[:number])
                row = replace_tag(row, piece, new) if first else remove_tag(row, piece)
        return row

    return _edit(f"Rename {old} to {new} in {{}}", images, _by_row(rewrite, lines))


def replace_text(
    images: Iterable[CaptionSnapshot], find: str, replacement: str, *, pattern: bool = False, capitals: bool = True
) -> Edit:
    r"""Replace all matches of a string or, with `pattern`, of a regular expression (groups: \1, \g<name>).

    Without `capitals`, case is ignored. Raises PatternError for an invalid pattern or replacement, and for a pattern
    that takes longer than PATIENCE seconds on a caption. The `regex` library supports timeouts and can release
    the GIL. The `re` module can do neither, and running it in a separate process would delay the preview by tenths of a
    second per keystroke.
    """
    if not find:
        return Edit("Replace nothing", ())
    if not pattern and capitals:
        rewrite: _Rewrite = lambda text: text.replace(find, replacement)  # noqa: E731 (one of two)
    else:
        rewrite = _substitution(find, replacement, pattern=pattern, capitals=capitals)
    return _edit(f"Replace {find} with {replacement or 'nothing'} in {{}}", images, rewrite)


def sort_tags(
    images: Sequence[CaptionSnapshot], order: Order | Sequence[str], keep: int = 0, lines: Lines = "caption"
) -> Edit:
    """Sort tags alphabetically, by descending frequency in these images, or in a given order (other tags last).

    The first `keep` tags of each caption, such as a trigger word, stay in place.
    """
    place = _placing(images, order, lines)

    def rewrite(row: str) -> str:
        found = find_tags(row)[keep:]
        for piece, tag in zip(
            reversed(found), sorted((piece.tag for piece in found), key=place, reverse=True), strict=True
        ):
            row = replace_tag(row, piece, tag) if piece.tag != tag else row
        return row

    return _edit("Sort the tags of {}", images, _by_row(rewrite, lines))


def remove_repeated(images: Iterable[CaptionSnapshot], lines: Lines = "caption") -> Edit:
    """Remove repeated tags from captions, keeping the first of each."""

    def rewrite(row: str) -> str:
        found = find_tags(row)
        for number, piece in reversed(list(enumerate(found))):
            if any(earlier.tag == piece.tag for earlier in found[:number]):
                row = remove_tag(row, piece)
        return row

    return _edit("Remove repeated tags from {}", images, _by_row(rewrite, lines))


def underscores_to_spaces(images: Iterable[CaptionSnapshot], lines: Lines = "caption") -> Edit:
    """Replace underscores in tags with spaces, except in emoticons such as ^_^."""
    return _edit("Replace underscores with spaces in {}", images, _by_row(_by_tag("_", " "), lines))


def spaces_to_underscores(images: Iterable[CaptionSnapshot], lines: Lines = "caption") -> Edit:
    """Replace spaces in tags with underscores."""
    return _edit("Replace spaces with underscores in {}", images, _by_row(_by_tag(" ", "_"), lines))


def tidy(images: Iterable[CaptionSnapshot], lines: Lines = "caption") -> Edit:
    """Separate tags with ", " and remove empty tags, extra spaces and meaningless line breaks."""

    def rewrite(text: str) -> str:
        rows = text.splitlines() if lines == "variants" else [text]
        neat = [join_tags(" ".join(tag.split()) for tag in split_tags(row)) for row in rows]
        return "\n".join(row for row in neat if row)

    return _edit("Tidy {}", images, rewrite)


def set_caption(images: Iterable[CaptionSnapshot], text: str) -> Edit:
    """Set the same caption on all images."""
    return _edit("Set the same text in {}", images, lambda _: text, makes=True)


def _edit(name: str, images: Iterable[CaptionSnapshot], rewrite: _Rewrite, *, makes: bool = False) -> Edit:
    """Return an edit of all captions that `rewrite` changes; "{}" in `name` becomes "N captions".

    With `makes`, images without a caption are treated as having an empty one.
    """
    changes = []
    for image in images:
        before = image.caption
        if before is not None or makes:
            after = rewrite(before or "")
            if after != (before or "") or (makes and before is None):
                changes.append(ValueChange(image.id, "caption", before, after))
    # Replace only the last "{}": tags and patterns in the name may contain the same characters.
    count = f"{len(changes):,} caption" + "s" * (len(changes) != 1)
    return Edit(count.join(name.rsplit("{}", 1)), tuple(changes))


def _by_row(rewrite: _Rewrite, lines: Lines) -> _Rewrite:
    """Return a function that applies `rewrite` to each line if `lines` is "variants", else to the whole caption."""
    if lines == "caption":
        return rewrite

    def whole(text: str) -> str:
        rows = text.splitlines(keepends=True) or [text]
        bare = [row.rstrip("\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029") for row in rows]
        # The original line breaks are put back, so that only the edited tags change in the file.
        # An empty line is not a variant, unless it is the whole caption.
        return "".join(
            (rewrite(row) if row.strip() or len(rows) == 1 else row) + whole[len(row) :]
            for row, whole in zip(bare, rows, strict=True)
        )

    return whole


def _quoted(tags: Sequence[str]) -> str:
    """Return up to three tags as text for an edit's name, or the number of tags if there are more."""
    return ", ".join(tags) if len(tags) <= 3 else f"{len(tags)} tags"


def _inserted(row: str, tags: str, at: int | None) -> str:
    found = find_tags(row)
    if at is not None and at < len(found):
        place = found[at].start
        return row[:place] + tags + JOINT + row[place:]
    body = row.rstrip()
    tail = row[len(body) :]
    if not found:
        return tags + tail
    return body + (" " if body.endswith(SEPARATOR) else JOINT) + tags + tail


def _by_tag(old: str, new: str) -> _Rewrite:
    def rewrite(row: str) -> str:
        if old not in row:
            return row
        for piece in reversed(find_tags(row)):
            if old in piece.tag and not is_emoticon(piece.tag):
                row = replace_tag(row, piece, piece.tag.replace(old, new))
        return row

    return rewrite


def _placing(
    images: Sequence[CaptionSnapshot], order: Order | Sequence[str], lines: Lines
) -> Callable[[str], tuple[int, str, str]]:
    """Return a sort key function for tags: by rank, then alphabetically regardless of case."""
    ranks: dict[str, int] = {}
    if order == "frequency":
        counts = Counter(tag for image in images for tag in split_tags(image.caption, lines))
        ranks = {tag: -count for tag, count in counts.items()}
    elif not isinstance(order, str):
        # Negative ranks, so that all other tags, which have rank 0, come last.
        ranks = {tag: number - len(order) for number, tag in enumerate(order)}
    return lambda tag: (ranks.get(tag, 0), tag.casefold(), tag)


def _substitution(find: str, replacement: str, *, pattern: bool, capitals: bool) -> _Rewrite:
    import regex

    flags = regex.VERSION0 | (0 if capitals else regex.IGNORECASE)
    try:
        compiled = regex.compile(find if pattern else regex.escape(find), flags)
    except regex.error as fault:
        sentence = f"Could not read the pattern: {fault.msg}, at character {(fault.pos or 0) + 1}."
        raise PatternError("bulk.pattern", sentence, "Correct the pattern at that position.", fault.pos or 0) from fault
    template = replacement if pattern else replacement.replace("\\", "\\\\")
    # Without a limit for all captions, a slow pattern could occupy the worker for a day if there are 100,000.
    deadline = time.monotonic() + PATIENCE_IN_ALL

    def rewrite(text: str) -> str:
        patience = min(PATIENCE, deadline - time.monotonic())
        try:
            return str(compiled.sub(template, text, concurrent=True, timeout=max(patience, 1e-3)))
        except TimeoutError as fault:
            raise _slow(text) from fault
        except (regex.error, IndexError) as fault:
            place = getattr(fault, "pos", None)
            sentence = f"Could not read the replacement: {fault}."
            raise PatternError("bulk.template", sentence, r"Write groups as \1 or \g<name>.", place) from fault

    rewrite("")  # checks the template even if nothing matches
    return rewrite


def _slow(text: str) -> PatternError:
    start = text if len(text) <= 60 else text[:60] + "..."
    return PatternError(
        "bulk.slow_pattern",
        f'The pattern takes too long on the caption "{start}": nested repetitions can match in too many ways.',
        "Avoid nested repetitions: write a+ instead of (a+)+.",
    )


def rate(images: Iterable[LibraryImage], rating: int | None) -> Edit:
    """Rate images from 1 to 5 stars, or remove their rating if `rating` is None."""
    changes = tuple(ValueChange(one.id, "rating", one.rating, rating) for one in images if one.rating != rating)
    verb = f"Rate {rating} of 5" if rating else "Remove the rating"
    return Edit(f"{verb}: {_counted(changes)}", changes)


def exclude(images: Iterable[LibraryImage], excluded: bool) -> Edit:
    """Exclude images from training, or include them again."""
    changes = tuple(
        ValueChange(one.id, "excluded", one.excluded, excluded) for one in images if one.excluded != excluded
    )
    return Edit(f"{'Exclude' if excluded else 'Include'} {_counted(changes)}", changes)


def exclude_others(images: Iterable[LibraryImage], kept: Collection[int]) -> Edit:
    """Exclude all images except those in `kept` (such as those that a filter shows), which do not change."""
    kept = frozenset(kept)
    edit = exclude((one for one in images if one.id not in kept), True)
    return Edit(f"Train only on the images shown: {edit.name.lower()}", edit.changes)


def mark_folder(folder: Folder, **facts: str | int | bool | None) -> Edit:
    """Change the given settings of a folder: `repeats`, `regularization` or `trigger`."""
    changes = tuple(
        FolderChange(folder, field, getattr(folder, field), facts[field])
        for field in _FOLDER
        if field in facts and facts[field] != getattr(folder, field)
    )
    return Edit(f"Change the folder {folder.path.name}", (), changes)


def _counted(changes: Collection[ValueChange]) -> str:
    return "1 image" if len(changes) == 1 else f"{len(changes)} images"


class Span(NamedTuple):
    """A part of a text: `text[start:end]`."""

    start: int
    end: int


class Differences(NamedTuple):
    """Parts of the first text that were removed, and parts of the second text that are new."""

    gone: tuple[Span, ...]
    new: tuple[Span, ...]


def differences(before: str, after: str) -> Differences:
    """Compare two texts word by word; return the shortest differences in whole words."""
    first, second = _WORDS.findall(before), _WORDS.findall(after)
    front = _alike(zip(first, second, strict=False))
    longest = min(len(first), len(second)) - front
    back = min(longest, _alike(zip(reversed(first), reversed(second), strict=False)))
    gone, new = _compare(first[front : len(first) - back], second[front : len(second) - back])
    return Differences(_spans(first, front, gone), _spans(second, front, new))


def _alike(pairs: Iterable[tuple[str, str]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _compare(first: list[str], second: list[str]) -> tuple[list[Span], list[Span]]:
    """Return the differing runs of words, as ranges of word indices in each text."""
    if len(first) > _MOST_WORDS or len(second) > _MOST_WORDS:
        return [Span(0, len(first))], [Span(0, len(second))]
    codes = SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    changed = [code for code in codes if code[0] != "equal"]
    return [Span(code[1], code[2]) for code in changed], [Span(code[3], code[4]) for code in changed]


def _spans(words: list[str], front: int, runs: list[Span]) -> tuple[Span, ...]:
    """Convert runs of words to character spans of the text."""
    return tuple(_places(words, front, [run for run in runs if run.end > run.start]))


def _places(words: list[str], front: int, runs: list[Span]) -> Iterator[Span]:
    place = number = 0
    for run in runs:
        place += sum(map(len, words[number : front + run.start]))
        number = front + run.end
        length = sum(map(len, words[front + run.start : number]))
        yield Span(place, place + length)
        place += length


class SnapshotCaption(NamedTuple):
    """Id and caption of an image at the time of the snapshot."""

    id: int
    caption: str | None


class CanceledError(Exception):
    """Raised when work on a snapshot was canceled."""


class CaptionSnapshots(Sequence[SnapshotCaption]):
    """Snapshot of captions. Take it on the library's thread (about 5 ms for 100,000 images) and read it on any thread.

    After `cancel`, iterating raises CanceledError, so that a worker stops soon.
    """

    def __init__(self, images: Iterable[LibraryImage]) -> None:
        # Two lists are four times as fast to make as a list of pairs.
        self._images = list(images)
        self._captions = [image.caption for image in self._images]
        self._off = False

    def cancel(self) -> None:
        """Cancel all work on this snapshot; may be called from any thread."""
        self._off = True

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[SnapshotCaption]:
        for image, caption in zip(self._images, self._captions, strict=True):
            if self._off:
                raise CanceledError
            yield SnapshotCaption(image.id, caption)

    @overload
    def __getitem__(self, place: int) -> SnapshotCaption: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[SnapshotCaption]: ...
    def __getitem__(self, place: int | slice) -> SnapshotCaption | Sequence[SnapshotCaption]:
        if isinstance(place, slice):
            chosen = zip(self._images[place], self._captions[place], strict=True)
            return [SnapshotCaption(image.id, caption) for image, caption in chosen]
        return SnapshotCaption(self._images[place].id, self._captions[place])
