"""Changes of many captions at once: pure functions from pictures and options to an edit, whose changes are the preview.

Each takes the pictures in their order, so what it is done to is the caller's choice, and leaves every character alone
that it is not asked to change. Pictures without a caption file get one only where words are added. They may run on a
worker: a caption that changes meanwhile is left out when the edit is done.
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
from app.core.library import Folder, FolderChange, FolderField, Picture, ValueChange
from app.core.tags.splitting import (
    JOINT,
    SEPARATOR,
    Lines,
    is_face,
    join_tags,
    pieces,
    remove_piece,
    replace_piece,
    split_tags,
)
from trainer.errors import ImpastoError

PATIENCE = 1.0
"""Seconds that a pattern may take for one caption; an ordinary one needs a few microseconds."""
PATIENCE_IN_ALL = 60.0

Order = Literal["alphabet", "frequency"]
_Rewrite = Callable[[str], str]
_FOLDER: tuple[FolderField, ...] = ("repeats", "regularisation", "trigger")
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
# Comparing takes time by the product of both lengths: past this, all between what both begin and end with differs.
_MOST_WORDS = 1500


class CaptionSnapshot(Protocol):
    """A picture, as far as it matters here."""

    @property
    def id(self) -> int:
        """Its number in this session."""

    @property
    def caption(self) -> str | None:
        """Its caption file's text, None where there is none."""


class PatternError(ImpastoError):
    """A pattern that cannot be used; `position` is where in it, counted from 0, or None where it is no one place."""

    def __init__(self, code: str, sentence: str, remedy: str, position: int | None = None) -> None:
        super().__init__(code, sentence, remedy)
        self.position = position


def add_tags(
    pictures: Iterable[CaptionSnapshot], tags: Sequence[str], at: int | None = None, lines: Lines = "caption"
) -> Edit:
    """Put tags before the one at place `at`, counted from 0, or behind the last; those that are there already stay."""

    def rewrite(row: str) -> str:
        present = set(split_tags(row))
        new = [tag for tag in dict.fromkeys(tags) if tag not in present]
        return _inserted(row, join_tags(new), at) if new else row

    return _edit(f"Add {_quoted(tags)} to {{}}", pictures, _by_row(rewrite, lines), makes=True)


def remove_tags(pictures: Iterable[CaptionSnapshot], tags: Iterable[str], lines: Lines = "caption") -> Edit:
    """Take tags away, each with the comma that parted it."""
    gone = list(dict.fromkeys(tags))

    def rewrite(row: str) -> str:
        for piece in reversed(pieces(row)):
            if piece.tag in gone:
                row = remove_piece(row, piece)
        return row

    return _edit(f"Remove {_quoted(gone)} from {{}}", pictures, _by_row(rewrite, lines))


def rename_tag(pictures: Iterable[CaptionSnapshot], old: str, new: str, lines: Lines = "caption") -> Edit:
    """Write a tag differently; where the new one stands already, the old one goes."""

    def rewrite(row: str) -> str:
        present = new in split_tags(row)
        found = pieces(row)
        for number, piece in reversed(list(enumerate(found))):
            if piece.tag == old:
                first = not present and all(earlier.tag != old for earlier in found[:number])
                row = replace_piece(row, piece, new) if first else remove_piece(row, piece)
        return row

    return _edit(f"Rename {old} to {new} in {{}}", pictures, _by_row(rewrite, lines))


def replace_text(
    pictures: Iterable[CaptionSnapshot], find: str, replacement: str, *, pattern: bool = False, capitals: bool = True
) -> Edit:
    r"""Replace text wherever it stands; with `pattern` both are a regular expression and its template (\1, \g<name>).

    With `capitals` off, A matches a. Raises PatternError: for a pattern or template that is none, with the place, and
    for one that takes longer than PATIENCE over a caption. The `regex` library ends a search at a deadline and lets
    other threads run meanwhile; the standard one can do neither, and a process for it would cost tenths of a second
    at every key of a live preview.
    """
    if not find:
        return Edit("Replace nothing", ())
    if not pattern and capitals:
        rewrite: _Rewrite = lambda text: text.replace(find, replacement)  # noqa: E731 (one of two)
    else:
        rewrite = _substitution(find, replacement, pattern=pattern, capitals=capitals)
    return _edit(f"Replace {find} by {replacement or 'nothing'} in {{}}", pictures, rewrite)


def sort_tags(
    pictures: Sequence[CaptionSnapshot], order: Order | Sequence[str], keep: int = 0, lines: Lines = "caption"
) -> Edit:
    """Sort tags by the alphabet, the commonest among these pictures first, or as given, those not given last.

    The first `keep` of each caption stay where they are, such as a trigger word.
    """
    place = _placing(pictures, order, lines)

    def rewrite(row: str) -> str:
        found = pieces(row)[keep:]
        for piece, tag in zip(
            reversed(found), sorted((piece.tag for piece in found), key=place, reverse=True), strict=True
        ):
            row = replace_piece(row, piece, tag) if piece.tag != tag else row
        return row

    return _edit("Sort the tags of {}", pictures, _by_row(rewrite, lines))


def remove_repeated(pictures: Iterable[CaptionSnapshot], lines: Lines = "caption") -> Edit:
    """Take away tags that stand in a caption already, further in front."""

    def rewrite(row: str) -> str:
        found = pieces(row)
        for number, piece in reversed(list(enumerate(found))):
            if any(earlier.tag == piece.tag for earlier in found[:number]):
                row = remove_piece(row, piece)
        return row

    return _edit("Remove repeated tags from {}", pictures, _by_row(rewrite, lines))


def underscores_to_spaces(pictures: Iterable[CaptionSnapshot], lines: Lines = "caption") -> Edit:
    """Write spaces for the underscores of tags, but in faces such as ^_^."""
    return _edit("Write spaces for underscores in {}", pictures, _by_row(_by_tag("_", " "), lines))


def spaces_to_underscores(pictures: Iterable[CaptionSnapshot], lines: Lines = "caption") -> Edit:
    """Write underscores for the spaces within tags."""
    return _edit("Write underscores for spaces in {}", pictures, _by_row(_by_tag(" ", "_"), lines))


def tidy(pictures: Iterable[CaptionSnapshot], lines: Lines = "caption") -> Edit:
    """Part tags by one comma and one space; remove empty ones, needless spaces, and line breaks that mean nothing."""

    def rewrite(text: str) -> str:
        rows = text.splitlines() if lines == "variants" else [text]
        neat = [join_tags(" ".join(tag.split()) for tag in split_tags(row)) for row in rows]
        return "\n".join(row for row in neat if row)

    return _edit("Tidy {}", pictures, rewrite)


def set_caption(pictures: Iterable[CaptionSnapshot], text: str) -> Edit:
    """Give all the same caption."""
    return _edit("Write the same caption to {}", pictures, lambda _: text, makes=True)


def _edit(name: str, pictures: Iterable[CaptionSnapshot], rewrite: _Rewrite, *, makes: bool = False) -> Edit:
    """Return the edit of all captions that the function changes; the braces in its name become their number.

    `makes`: pictures without a caption count as having an empty one.
    """
    changes = []
    for picture in pictures:
        before = picture.caption
        if before is not None or makes:
            after = rewrite(before or "")
            if after != (before or "") or (makes and before is None):
                changes.append(ValueChange(picture.id, "caption", before, after))
    count = f"{len(changes):,} caption" + "s" * (len(changes) != 1)
    return Edit(count.join(name.rsplit("{}", 1)), tuple(changes))


def _by_row(rewrite: _Rewrite, lines: Lines) -> _Rewrite:
    """Return the function for a whole caption: each alternative for itself, or all of it."""
    if lines == "caption":
        return rewrite

    def whole(text: str) -> str:
        rows = text.splitlines(keepends=True) or [text]
        bare = [row.rstrip("\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029") for row in rows]
        # An empty line is no alternative, unless it is all there is.
        return "".join(
            (rewrite(row) if row.strip() or len(rows) == 1 else row) + whole[len(row) :]
            for row, whole in zip(bare, rows, strict=True)
        )

    return whole


def _quoted(tags: Sequence[str]) -> str:
    """Return tags for the name of an edit, which has to fit a menu."""
    return ", ".join(tags) if len(tags) <= 3 else f"{len(tags)} tags"


def _inserted(row: str, tags: str, at: int | None) -> str:
    found = pieces(row)
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
        for piece in reversed(pieces(row)):
            if old in piece.tag and not is_face(piece.tag):
                row = replace_piece(row, piece, piece.tag.replace(old, new))
        return row

    return rewrite


def _placing(
    pictures: Sequence[CaptionSnapshot], order: Order | Sequence[str], lines: Lines
) -> Callable[[str], tuple[int, str, str]]:
    """Return what tags are sorted by: a rank, then the alphabet, capitals or not."""
    ranks: dict[str, int] = {}
    if order == "frequency":
        counts = Counter(tag for picture in pictures for tag in split_tags(picture.caption, lines))
        ranks = {tag: -count for tag, count in counts.items()}
    elif not isinstance(order, str):
        ranks = {tag: number - len(order) for number, tag in enumerate(order)}
    return lambda tag: (ranks.get(tag, 0), tag.casefold(), tag)


def _substitution(find: str, replacement: str, *, pattern: bool, capitals: bool) -> _Rewrite:
    import regex

    flags = regex.VERSION0 | (0 if capitals else regex.IGNORECASE)
    try:
        compiled = regex.compile(find if pattern else regex.escape(find), flags)
    except regex.error as fault:
        sentence = f"The pattern is not complete or not correct: {fault.msg}, at character {(fault.pos or 0) + 1}."
        raise PatternError("bulk.pattern", sentence, "Correct it there.", fault.pos or 0) from fault
    template = replacement if pattern else replacement.replace("\\", "\\\\")
    deadline = time.monotonic() + PATIENCE_IN_ALL

    def rewrite(text: str) -> str:
        patience = min(PATIENCE, deadline - time.monotonic())
        try:
            return str(compiled.sub(template, text, concurrent=True, timeout=max(patience, 1e-3)))
        except TimeoutError as fault:
            raise _slow(text) from fault
        except (regex.error, IndexError) as fault:
            place = getattr(fault, "pos", None)
            sentence = f"What to write instead is not correct: {fault}."
            raise PatternError("bulk.template", sentence, r"Groups are written \1 or \g<name>.", place) from fault

    rewrite("")  # a template is read even where nothing matches
    return rewrite


def _slow(text: str) -> PatternError:
    start = text if len(text) <= 60 else text[:60] + "..."
    return PatternError(
        "bulk.slow_pattern",
        f'The pattern takes too long, at the caption "{start}": repetitions within repetitions try countless ways.',
        "Write it without one repetition inside another, such as a+ for (a+)+.",
    )


def rate(pictures: Iterable[Picture], rating: int | None) -> Edit:
    """Give pictures a rating, 1 to 5, or take it from them."""
    changes = tuple(ValueChange(one.id, "rating", one.rating, rating) for one in pictures if one.rating != rating)
    verb = f"Rate {rating} of 5" if rating else "Remove the rating"
    return Edit(f"{verb}: {_counted(changes)}", changes)


def exclude(pictures: Iterable[Picture], excluded: bool) -> Edit:
    """Leave pictures out of training, or take them in again."""
    changes = tuple(
        ValueChange(one.id, "excluded", one.excluded, excluded) for one in pictures if one.excluded != excluded
    )
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


def _counted(changes: Collection[ValueChange]) -> str:
    return "1 image" if len(changes) == 1 else f"{len(changes)} images"


class Span(NamedTuple):
    """A part of a text: `text[start:end]`."""

    start: int
    end: int


class Differences(NamedTuple):
    """The parts that only the first text has, and those that only the second has."""

    gone: tuple[Span, ...]
    new: tuple[Span, ...]


def differences(before: str, after: str) -> Differences:
    """Compare by words; each difference is as short as whole words allow."""
    first, second = _WORDS.findall(before), _WORDS.findall(after)
    front = _alike(zip(first, second, strict=False))
    longest = min(len(first), len(second)) - front
    back = min(longest, _alike(zip(reversed(first), reversed(second), strict=False)))
    gone, new = _compare(first[front : len(first) - back], second[front : len(second) - back])
    return Differences(_spans(first, front, gone), _spans(second, front, new))


def _alike(pairs: Iterable[tuple[str, str]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _compare(first: list[str], second: list[str]) -> tuple[list[Span], list[Span]]:
    """Return the runs of words that only one of both has, by their places among the words."""
    if len(first) > _MOST_WORDS or len(second) > _MOST_WORDS:
        return [Span(0, len(first))], [Span(0, len(second))]
    codes = SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    changed = [code for code in codes if code[0] != "equal"]
    return [Span(code[1], code[2]) for code in changed], [Span(code[3], code[4]) for code in changed]


def _spans(words: list[str], front: int, runs: list[Span]) -> tuple[Span, ...]:
    """Return runs of words as parts of the text."""
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
    """A picture's caption at that moment."""

    id: int
    caption: str | None


class CalledOffError(Exception):
    """Nobody wants the result any more."""


class CaptionSnapshots(Sequence[SnapshotCaption]):
    """Taken on the library's thread, some 5 ms for 100,000 pictures; then any thread may read it.

    After `call_off` whoever goes through it is thrown out by CalledOffError, so that a worker is soon free again.
    """

    def __init__(self, pictures: Iterable[Picture]) -> None:
        # Two lists, as a pair for each picture takes four times as long.
        self._pictures = list(pictures)
        self._captions = [picture.caption for picture in self._pictures]
        self._off = False

    def call_off(self) -> None:
        """End whatever is made of it; from any thread."""
        self._off = True

    def __len__(self) -> int:
        return len(self._pictures)

    def __iter__(self) -> Iterator[SnapshotCaption]:
        for picture, caption in zip(self._pictures, self._captions, strict=True):
            if self._off:
                raise CalledOffError
            yield SnapshotCaption(picture.id, caption)

    @overload
    def __getitem__(self, place: int) -> SnapshotCaption: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[SnapshotCaption]: ...
    def __getitem__(self, place: int | slice) -> SnapshotCaption | Sequence[SnapshotCaption]:
        if isinstance(place, slice):
            chosen = zip(self._pictures[place], self._captions[place], strict=True)
            return [SnapshotCaption(picture.id, caption) for picture, caption in chosen]
        return SnapshotCaption(self._pictures[place].id, self._captions[place])
