"""Writes requests to disk, without thread or clock: reads, judges, backs up, replaces, reads back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.core.edits import captions
from app.core.edits.backups import Backups
from app.core.edits.captions import Caption, Neighbours, plain
from app.core.edits.safe_files import (
    SYNCS_FILE_SYSTEM,
    ChangedMeanwhileError,
    Seen,
    refusal,
    remove_file,
    replace_file,
    sweep,
    sync_file_system,
)
from app.core.edits.save_state import SaveRequest
from app.core.pictures import Value
from trainer.errors import DatasetError
from trainer.protocol.places import write_remedy

if TYPE_CHECKING:
    from app.core.edits.notes import Notes

_Verdict = Literal["there", "write", "theirs", "conflict"]
_NO_TEXT = (None, "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request."""

    request: SaveRequest
    kind: Literal["saved", "conflict", "refused"]
    found: Value = None
    """What is on disk now; where it is saved and yet differs from what was asked for, the library has to learn it."""
    error: DatasetError | None = None
    notice: str | None = None
    """Code of something that the user should hear once: notice.converted, notice.beside_list."""


@dataclass(frozen=True, slots=True)
class _Plan:
    request: SaveRequest
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
        """Files that this session saw absent and made: only those are ever removed."""
        self._swept: set[str] = set()
        """Folders that were looked through for what killed writers left."""

    def write(self, requests: Sequence[SaveRequest]) -> Iterator[Outcome]:
        """Write these, each value once; give what became of each, as soon as it is known.

        A single one is safe from power cuts when it is given, many are when the last one was given and this has ended:
        until then the journal must not call them saved.
        """
        durable = len(requests) < 10 or not SYNCS_FILE_SYSTEM
        for root, group in groupby(sorted(requests, key=lambda request: request.key), lambda request: request.key.root):
            mine = list(group)
            yield from self._write_captions(
                root, [request for request in mine if request.key.field == "caption"], durable
            )
            if not durable:
                with contextlib.suppress(OSError):  # a folder that is gone is reported by its files
                    sync_file_system(root)
            others = sorted(
                (request for request in mine if request.key.field != "caption"), key=lambda request: request.key.folder
            )
            for folder, values in groupby(others, lambda request: request.key.folder):
                yield from self._write_notes(root, folder, list(values))

    def _write_captions(self, root: str, requests: Sequence[SaveRequest], durable: bool) -> Iterator[Outcome]:
        around = Neighbours(Path(root))
        plans: list[_Plan] = []
        closed: dict[str, DatasetError] = {}
        for request in requests:
            judged = self._plan(request, around, closed)
            if isinstance(judged, Outcome):
                yield judged
            else:
                plans.append(judged)
        try:
            self._backups.keep(root, self._unknown(root, plans))
        except OSError as fault:
            yield from (Outcome(plan.request, "refused", error=_no_backup(fault, root)) for plan in plans)
            return
        for plan in plans:
            yield self._carry_out(plan, around, closed, durable)

    def _plan(self, request: SaveRequest, around: Neighbours, closed: dict[str, DatasetError]) -> _Plan | Outcome:
        path = request.key.text
        try:
            found = captions.look(path, around)
            verdict = _judge(plain(_text(request.desired)), [plain(_text(base)) for base in request.bases], found.text)
            if verdict == "write":
                return _Plan(request, found, self._data(request, found, around))
        except DatasetError as error:
            return Outcome(request, "refused", error=error)
        except OSError as fault:
            return Outcome(request, "refused", error=_closed(fault, os.path.dirname(path), closed))  # noqa: PTH120 (ten times as fast)
        kind: Literal["saved", "conflict"] = "conflict" if verdict == "conflict" else "saved"
        return Outcome(request, kind, request.desired if verdict == "there" else found.text)

    def _data(self, request: SaveRequest, found: Caption, around: Neighbours) -> bytes | None:
        """Return what the file is to hold, None to remove it: if no caption is wanted, or its list's caption again.

        A file that was there before is emptied instead, which means the same to training: it may be another program's.
        """
        text = plain(_text(request.desired))
        if found.seen.data is not None and not self._is_ours(found):
            self._made.discard(found.file)  # another program wrote it since
        if found.file in self._made and (text is None or plain(around.listed(request.key.path)) == text):
            return None
        return captions.encode(text or "")

    def _unknown(self, root: str, plans: Iterable[_Plan]) -> Iterator[tuple[str, bytes | None]]:
        """Give what is to be overwritten and is not our own writing, or is to be removed."""
        for plan in plans:
            data = plan.found.seen.data
            if plan.data is None or data is None or not self._is_ours(plan.found):
                yield _within(plan.found.file, root), data

    def _is_ours(self, found: Caption) -> bool:
        """Return whether a file holds what we wrote last."""
        return self._ours.get(found.file) == hash(found.seen.data)

    def _carry_out(self, plan: _Plan, around: Neighbours, closed: dict[str, DatasetError], durable: bool) -> Outcome:
        request, file = plan.request, plan.found.file
        folder = os.path.dirname(file)  # noqa: PTH120 (ten times as fast)
        if folder in closed:  # each further try could take seconds
            return Outcome(request, "refused", error=closed[folder])
        self._sweep(request.key.root, folder)
        try:
            if plan.data is None:
                remove_file(file, plan.found.seen)
                self._ours.pop(file, None)
            else:
                replace_file(file, plan.found.seen, plan.data, within=request.key.root, durable=durable)
                self._ours[file] = hash(plan.data)
                if plan.found.seen.data is None:
                    self._made.add(file)
            # Another file, or the list, may count where this one is empty.
            true = request.desired if plan.data else captions.look(request.key.text, around).text
        except ChangedMeanwhileError:
            return self._again(request, around, closed, durable)
        except DatasetError as error:
            return Outcome(request, "refused", error=error)
        except OSError as fault:
            return Outcome(request, "refused", error=_closed(fault, folder, closed))
        return Outcome(request, "saved", true, notice=_notice(plan))

    def _sweep(self, root: str, folder: str) -> None:
        if folder not in self._swept:
            self._swept.add(folder)
            within = _within(folder, root)
            sweep(folder, lambda name, data: self._backups.keep(root, [(f"{within}/{name}".lstrip("/"), data)]))

    def _again(
        self, request: SaveRequest, around: Neighbours, closed: dict[str, DatasetError], durable: bool
    ) -> Outcome:
        """Judge once more what another program changed while we were about to write it."""
        judged = self._plan(request, around, closed)
        if isinstance(judged, Outcome):
            return judged
        try:
            self._backups.keep(request.key.root, self._unknown(request.key.root, [judged]))
        except OSError as fault:
            return Outcome(request, "refused", error=_no_backup(fault, request.key.root))
        return self._carry_out(judged, around, closed, durable)

    def _write_notes(self, root: str, folder: Path, requests: Sequence[SaveRequest]) -> Iterator[Outcome]:
        from app.core.edits.notes import read_notes  # late: it brings pydantic, which the window does not wait for

        outcomes: list[Outcome] = []
        due: list[SaveRequest] = []
        try:
            found = read_notes(folder, Neighbours(Path(root)))
            for request in requests:
                value = found.value(request)
                verdict = _judge(request.desired, _note_bases(request), value)
                if verdict == "write":
                    due.append(request)
                else:
                    there = request.desired if verdict == "there" else value
                    outcomes.append(Outcome(request, "conflict" if verdict == "conflict" else "saved", there))
            if due:
                self._replace_notes(root, found, found.with_values(due))
        except ChangedMeanwhileError:
            yield from self._write_notes(root, folder, requests)
            return
        except DatasetError as error:
            yield from (Outcome(request, "refused", error=error) for request in requests)
            return
        except OSError as fault:
            yield from (Outcome(request, "refused", error=refusal(fault, folder)) for request in requests)
            return
        yield from outcomes
        yield from (Outcome(request, "saved", request.desired) for request in due)

    def _replace_notes(self, root: str, found: Notes, data: bytes) -> None:
        name = str(found.file)
        if found.data is None or self._ours.get(name) != hash(found.data):
            try:
                self._backups.keep(root, [(_within(name, root), found.data)])
            except OSError as fault:
                raise _no_backup(fault, root) from fault
        self._sweep(root, str(found.file.parent))
        replace_file(name, Seen(found.data), data, within=root, durable=True)
        self._ours[name] = hash(data)


def _judge(desired: Value, bases: Sequence[Value], found: Value) -> _Verdict:
    """Return what is to be done where `found` is on disk: only what we know of is ever replaced."""
    if found == desired:
        return "there"
    if found in bases or (found in _NO_TEXT and any(base in _NO_TEXT for base in bases)):
        return "write"
    return "theirs" if desired in bases[:1] else "conflict"


def _note_bases(request: SaveRequest) -> Sequence[Value]:
    # A folder's facts may come from its name, as 10_cat does; then its notes say nothing of them yet.
    return (*request.bases, None, False) if request.bases and request.key.of_folder else request.bases


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
