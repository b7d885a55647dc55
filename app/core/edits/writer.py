"""Brings wishes to disk, without thread or clock: looks, judges, backs up, replaces, reads back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.core.edits import captions
from app.core.edits.backups import Backups
from app.core.edits.captions import Caption, Neighbours, plain
from app.core.edits.replacing import ChangedMeanwhileError, Seen, refusal, remove_file, replace_file, sweep
from app.core.edits.wishes import Wish
from app.core.pictures import Value
from trainer.errors import DatasetError
from trainer.protocol.places import write_remedy

if TYPE_CHECKING:
    from app.core.edits.notes import Notes

_Verdict = Literal["there", "write", "theirs", "conflict"]
_NO_TEXT = (None, "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a wish."""

    wish: Wish
    kind: Literal["saved", "conflict", "refused"]
    found: Value = None
    """What stands on disk now; where it is saved and yet differs from what was wished, that is to be learned."""
    error: DatasetError | None = None
    notice: str | None = None
    """Code of something that the user should hear once: notice.converted, notice.beside_list."""


@dataclass(frozen=True, slots=True)
class _Plan:
    wish: Wish
    found: Caption
    data: bytes | None
    """What the file shall hold; None: it is to be removed."""


class Writer:
    """Writes captions and notes; belongs to the writer's thread."""

    def __init__(self, backups: Backups) -> None:
        self._backups = backups
        self._ours: dict[str, int] = {}
        """What we wrote last into each file, by a hash of its bytes: all else is kept before it is overwritten."""
        self._made: set[str] = set()
        """Files that were not there before we wrote them."""
        self._swept: set[str] = set()
        """Folders that were looked through for what killed writers left."""

    def write(self, wishes: Sequence[Wish]) -> Iterator[Outcome]:
        """Bring these to disk, each value once; give what became of each, as soon as it is known.

        A single one is on the disk itself when it is given, safe from power cuts; of more, the journal is.
        """
        durable = len(wishes) < 10
        for root, group in groupby(sorted(wishes, key=lambda wish: wish.key), lambda wish: wish.key.root):
            mine = list(group)
            yield from self._write_captions(root, [wish for wish in mine if wish.key.field == "caption"], durable)
            others = sorted((wish for wish in mine if wish.key.field != "caption"), key=lambda wish: wish.key.folder)
            for folder, values in groupby(others, lambda wish: wish.key.folder):
                yield from self._write_notes(root, folder, list(values))

    def _write_captions(self, root: str, wishes: Sequence[Wish], durable: bool) -> Iterator[Outcome]:
        around = Neighbours(Path(root))
        plans: list[_Plan] = []
        closed: dict[str, DatasetError] = {}
        for wish in wishes:
            judged = self._plan(wish, around, closed)
            if isinstance(judged, Outcome):
                yield judged
            else:
                plans.append(judged)
        try:
            self._backups.keep(root, self._unknown(root, plans))
        except OSError as fault:
            yield from (Outcome(plan.wish, "refused", error=_no_backup(fault, root)) for plan in plans)
            return
        for plan in plans:
            yield self._carry_out(plan, around, closed, durable)

    def _plan(self, wish: Wish, around: Neighbours, closed: dict[str, DatasetError]) -> _Plan | Outcome:
        path = wish.key.text
        try:
            found = captions.look(path, around)
            verdict = _judge(plain(_text(wish.desired)), [plain(_text(base)) for base in wish.bases], found.text)
            if verdict == "write":
                return _Plan(wish, found, self._data(wish, found, around))
        except DatasetError as error:
            return Outcome(wish, "refused", error=error)
        except OSError as fault:
            return Outcome(wish, "refused", error=_closed(fault, os.path.dirname(path), closed))  # noqa: PTH120 (ten times as fast)
        kind: Literal["saved", "conflict"] = "conflict" if verdict == "conflict" else "saved"
        return Outcome(wish, kind, wish.desired if verdict == "there" else found.text)

    def _data(self, wish: Wish, found: Caption, around: Neighbours) -> bytes | None:
        """Return what the file shall hold; a file that we made goes again when its list's caption is wished back."""
        text = plain(_text(wish.desired))
        if text is None or (found.file in self._made and plain(around.listed(wish.key.path)) == text):
            return None
        return captions.encode(text)

    def _unknown(self, root: str, plans: Iterable[_Plan]) -> Iterator[tuple[str, bytes | None]]:
        """Give what is to be overwritten and is not our own writing, or is to be removed."""
        for plan in plans:
            data = plan.found.seen.data
            if plan.data is None or data is None or self._ours.get(plan.found.file) != hash(data):
                yield _within(plan.found.file, root), data

    def _carry_out(self, plan: _Plan, around: Neighbours, closed: dict[str, DatasetError], durable: bool) -> Outcome:
        wish, file = plan.wish, plan.found.file
        folder = os.path.dirname(file)  # noqa: PTH120 (ten times as fast)
        if folder in closed:  # each further try could take seconds
            return Outcome(wish, "refused", error=closed[folder])
        self._sweep(folder)
        try:
            if plan.data is None:
                remove_file(file, plan.found.seen)
                self._ours.pop(file, None)
            else:
                replace_file(file, plan.found.seen, plan.data, durable=durable)
                self._ours[file] = hash(plan.data)
                if plan.found.seen.data is None:
                    self._made.add(file)
            # Another file, or the list, may speak where this one falls silent.
            true = wish.desired if plan.data else captions.look(wish.key.text, around).text
        except ChangedMeanwhileError:
            return self._again(wish, around, closed, durable)
        except DatasetError as error:
            return Outcome(wish, "refused", error=error)
        except OSError as fault:
            return Outcome(wish, "refused", error=_closed(fault, folder, closed))
        return Outcome(wish, "saved", true, notice=_notice(plan))

    def _sweep(self, folder: str) -> None:
        if folder not in self._swept:
            self._swept.add(folder)
            sweep(folder)

    def _again(self, wish: Wish, around: Neighbours, closed: dict[str, DatasetError], durable: bool) -> Outcome:
        """Judge once more what another program changed while we were about to write it."""
        judged = self._plan(wish, around, closed)
        if isinstance(judged, Outcome):
            return judged
        try:
            self._backups.keep(wish.key.root, self._unknown(wish.key.root, [judged]))
        except OSError as fault:
            return Outcome(wish, "refused", error=_no_backup(fault, wish.key.root))
        return self._carry_out(judged, around, closed, durable)

    def _write_notes(self, root: str, folder: Path, wishes: Sequence[Wish]) -> Iterator[Outcome]:
        from app.core.edits.notes import read_notes  # late: it brings pydantic, which the window does not wait for

        outcomes: list[Outcome] = []
        due: list[Wish] = []
        try:
            found = read_notes(folder)
            for wish in wishes:
                value = found.value(wish)
                verdict = _judge(wish.desired, _note_bases(wish), value)
                if verdict == "write":
                    due.append(wish)
                else:
                    there = wish.desired if verdict == "there" else value
                    outcomes.append(Outcome(wish, "conflict" if verdict == "conflict" else "saved", there))
            if due:
                self._replace_notes(root, found, found.with_values(due))
        except ChangedMeanwhileError:
            yield from self._write_notes(root, folder, wishes)
            return
        except DatasetError as error:
            yield from (Outcome(wish, "refused", error=error) for wish in wishes)
            return
        except OSError as fault:
            yield from (Outcome(wish, "refused", error=refusal(fault, folder)) for wish in wishes)
            return
        yield from outcomes
        yield from (Outcome(wish, "saved", wish.desired) for wish in due)

    def _replace_notes(self, root: str, found: Notes, data: bytes) -> None:
        name = str(found.file)
        if found.data is None or self._ours.get(name) != hash(found.data):
            try:
                self._backups.keep(root, [(_within(name, root), found.data)])
            except OSError as fault:
                raise _no_backup(fault, root) from fault
        self._sweep(str(found.file.parent))
        replace_file(name, Seen(found.data), data, durable=True)
        self._ours[name] = hash(data)


def _judge(desired: Value, bases: Sequence[Value], found: Value) -> _Verdict:
    """Say what is to be done where `found` stands: only what we know of is ever replaced."""
    if found == desired:
        return "there"
    if found in bases or (found in _NO_TEXT and any(base in _NO_TEXT for base in bases)):
        return "write"
    return "theirs" if desired in bases[:1] else "conflict"


def _note_bases(wish: Wish) -> Sequence[Value]:
    # A folder's facts may come from its name, as 10_cat does; then its notes say nothing of them yet.
    return (*wish.bases, None, False) if wish.bases and wish.key.of_folder else wish.bases


def _text(value: Value) -> str | None:
    assert value is None or isinstance(value, str)
    return value


def _within(file: str, root: str) -> str:
    return file[len(root) :].replace(os.sep, "/").lstrip("/")  # ten times as fast as relative_to


def _notice(plan: _Plan) -> str | None:
    if plan.found.seen.data is None and plan.found.listed is not None and plan.data is not None:
        return "notice.beside_list"
    return "notice.converted" if plan.found.encoding != "utf-8" else None


def _closed(fault: OSError, folder: str, closed: dict[str, DatasetError]) -> DatasetError:
    return closed.setdefault(folder, refusal(fault, Path(folder)))


def _no_backup(fault: OSError, root: str) -> DatasetError:
    return DatasetError(
        "save.no_backup",
        f"Originals of {root} cannot be backed up ({fault.strerror or fault}); nothing is overwritten without that.",
        f"{write_remedy(fault)} It is Impasto's own folder; what you changed is kept until then.",
    )
