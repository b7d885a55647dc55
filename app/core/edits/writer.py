"""Writes requests to disk, without thread or clock: reads, judges, backs up, replaces, reads back."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

from app.core.edits.backups import Backups
from app.core.edits.safe_files import (
    SYNCS_FILE_SYSTEM,
    ChangedMeanwhileError,
    FileSeen,
    look_at,
    refusal,
    remove_file,
    replace_file,
    sweep,
    sync_file_system,
)
from app.core.edits.save_state import SaveRequest
from app.core.library import Value
from trainer.dataset.caption_files import (
    LARGEST,
    METADATA_NAME,
    SUFFIXES,
    NotACaptionError,
    decode_caption,
    read_metadata,
)
from trainer.dataset.links import Links
from trainer.dataset.sidecar import FILE_NAME, Sidecar, read_sidecar, sidecar_text
from trainer.errors import DatasetError, plain_reason
from trainer.protocol.files import long_name, long_path
from trainer.protocol.places import write_remedy
from trainer.protocol.reading import read_bytes

# A picture's name of 250 letters leaves room for .txt but not for .caption: no file has such a name.
_IMPOSSIBLE = (errno.EINVAL if sys.platform == "win32" else errno.ENAMETOOLONG,)
_NO_TEXT = (None, "")


@dataclass(frozen=True, slots=True)
class Caption:
    """What training reads for a picture, and where it stands."""

    text: str | None
    """None where there is no caption at all."""
    file: str
    """The file that is read; where there is none, or another program's list is, the one to make."""
    seen: FileSeen
    """What it holds."""
    listed: str | None = None
    """What metadata.jsonl says, if it was looked at: only where no caption file counts."""
    encoding: str = "utf-8"


@dataclass
class Neighbours:
    """What lies in folders beside the pictures, looked up once for a batch."""

    root: Path
    links: Links = field(init=False)
    _odd: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _listed: dict[Path, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links = Links([self.root])

    def require_inside(self, file: str) -> None:
        """Raise DatasetError for a link that leads out of the dataset, such as to the user's own files."""
        if os.path.islink(long_name(file)) and not self.links.allow(Path(file)):  # noqa: PTH114 (five times as fast)
            raise link_outside(file)

    def spelled(self, file: str) -> str | None:
        """Return the file whose ending is this one's in capitals, or partly so; for systems that tell them apart."""
        folder, wanted = os.path.split(file)
        if folder not in self._odd:
            # Where the folder itself is gone this raises: a caption in it is not missing, it cannot be known.
            names = [path.name for path in long_path(Path(folder)).iterdir()]
            odd = [name for name in names if name.lower().endswith(SUFFIXES) and not name.endswith(SUFFIXES)]
            self._odd[folder] = {Path(name).stem + Path(name).suffix.lower(): name for name in odd}
        name = self._odd[folder].get(wanted)
        return os.path.join(folder, name) if name else None  # noqa: PTH118 (ten times as fast)

    def listed(self, picture: Path) -> str | None:
        """Return the caption that metadata.jsonl beside the picture, or at the dataset's root, gives it."""
        own = self._metadata(picture.parent).get(picture.name)
        if own is not None or picture.parent == self.root:
            return own
        return self._metadata(self.root).get(picture.relative_to(self.root).as_posix())

    def _metadata(self, folder: Path) -> Mapping[str, str]:
        if folder not in self._listed:
            path = folder / METADATA_NAME
            self._listed[folder] = read_metadata(path)[0] if self.links.allow_file(path) else {}
        return self._listed[folder]


def link_outside(file: str) -> DatasetError:
    """Return the refusal to read or write through a link."""
    return DatasetError(
        "save.outside",
        f"{file} is a link that leads out of the dataset, so it is neither read nor written.",
        "Replace the link with a copy of the file; what you changed is kept until then.",
    )


def plain(text: str | None) -> str | None:
    r"""Return a caption as it can stand in a file: line ends as "\n", no byte order mark; a blank one is empty."""
    if text is None:
        return None
    text = text.lstrip("\ufeff")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "" if text.isspace() else text


def look(picture: str, around: Neighbours) -> Caption:
    """Return a picture's caption as training reads it: the first of .txt, .caption and metadata.jsonl not blank.

    Raises OSError, and DatasetError where the file that counts is no text.
    """
    first: Caption | None = None
    stem = os.path.splitext(picture)[0]  # noqa: PTH122 (ten times as fast)
    for suffix in SUFFIXES:
        if found := _read(stem + suffix, around):
            if found.text:
                return found
            first = first or found
    listed = around.listed(Path(picture))
    if first:
        return Caption(plain(listed) or "", first.file, first.seen, listed, first.encoding)
    return Caption(plain(listed), stem + SUFFIXES[0], FileSeen(None), listed)


def _read(file: str, around: Neighbours) -> Caption | None:
    try:
        around.require_inside(file)
        seen = look_at(file, LARGEST + 1)
    except OSError as fault:
        if fault.errno in _IMPOSSIBLE:
            return None
        if not isinstance(fault, FileNotFoundError):
            raise
        spelled = around.spelled(file)
        if spelled is None:
            return None
        around.require_inside(spelled)
        file, seen = spelled, look_at(spelled, LARGEST + 1)
    try:
        decoded = decode_caption(seen.data or b"")
    except NotACaptionError as fault:
        raise DatasetError(
            "caption.unreadable",
            f"{file} is not used as a caption: {fault}.",
            "Move that file away if it is not needed; the caption waits here until then.",
        ) from fault
    return Caption(plain(decoded.text), file, seen, encoding=decoded.encoding)


def encode(text: str) -> bytes:
    """Return a caption's bytes for its file; raises DatasetError where training could not read them again."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as fault:
        raise _unwritable(f"character {fault.start + 1} is half of one and has no form in UTF-8") from fault
    if len(data) > LARGEST:
        raise _unwritable(f"it is longer than {LARGEST:,} bytes")
    if "\0" in text:
        raise _unwritable(f"character {text.index(chr(0)) + 1} is a zero, which stands in no text")
    return data


def _unwritable(reason: str) -> DatasetError:
    return DatasetError(
        "caption.unwritable",
        f"A caption cannot be written: {reason}.",
        "Correct the caption; it waits here until then.",
    )


_Verdict = Literal["there", "write", "theirs", "conflict"]


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
            found = look(path, around)
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
        return encode(text or "")

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
            true = request.desired if plan.data else look(request.key.text, around).text
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

    def _replace_notes(self, root: str, found: NotesFile, data: bytes) -> None:
        name = str(found.file)
        if found.data is None or self._ours.get(name) != hash(found.data):
            try:
                self._backups.keep(root, [(_within(name, root), found.data)])
            except OSError as fault:
                raise _no_backup(fault, root) from fault
        self._sweep(root, str(found.file.parent))
        replace_file(name, FileSeen(found.data), data, within=root, durable=True)
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


@dataclass(frozen=True, slots=True)
class NotesFile:
    """The notes of one folder, and the bytes that they were read from."""

    file: Path
    data: bytes | None
    """None where there is no file."""
    sidecar: Sidecar

    def value(self, wish: SaveRequest) -> Value:
        """Return what stands there for a wish's value."""
        holder = self.sidecar.folder if wish.key.of_folder else self.sidecar.of(wish.key.path.name)
        value: Value = getattr(holder, wish.key.field)
        return value

    def with_values(self, wishes: Sequence[SaveRequest]) -> bytes:
        """Return the bytes that hold what is wished, all else as it is; raises DatasetError for impossible values."""
        pictures: dict[str, dict[str, object]] = {}
        facts: dict[str, object] = {}
        for wish in wishes:
            whose = facts if wish.key.of_folder else pictures.setdefault(wish.key.path.name, {})
            whose[wish.key.field] = wish.desired
        return sidecar_text(_changed(self.sidecar, facts, pictures)).encode("utf-8")


def read_notes(folder: Path, around: Neighbours) -> NotesFile:
    """Return a folder's notes; raises DatasetError when they are damaged or lead out of the dataset, and OSError."""
    file = folder / FILE_NAME
    around.require_inside(str(file))
    data = _bytes(file)
    sidecar = read_sidecar(folder)
    while (now := _bytes(file)) != data:  # written between the two looks
        data, sidecar = now, read_sidecar(folder)
    return NotesFile(file, data, sidecar)


def _bytes(file: Path) -> bytes | None:
    try:
        return read_bytes(file, "notes")
    except FileNotFoundError:
        return None


def _changed(sidecar: Sidecar, facts: Mapping[str, object], pictures: Mapping[str, Mapping[str, object]]) -> Sidecar:
    try:
        return (sidecar.with_folder(**facts) if facts else sidecar).with_pictures(pictures)
    except ValueError as fault:  # pydantic's errors are ValueErrors
        raise DatasetError(
            "save.value", f"A note cannot be kept: {plain_reason(fault)}.", "Undo that change, or choose another value."
        ) from fault
