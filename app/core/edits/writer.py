"""Write save requests to disk: read, compare, back up, replace and read back, without threads or timers."""

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
from trainer.dataset.sidecar import FILE_NAME, Sidecar, read_sidecar, sidecar_text
from trainer.errors import DatasetError, plain_reason
from trainer.protocol.files import Links, long_name, long_path
from trainer.protocol.places import write_remedy
from trainer.protocol.reading import read_bytes

# A file name of 250 characters leaves room for .txt but not for .caption, which the system rejects.
_INVALID_NAME = (errno.EINVAL if sys.platform == "win32" else errno.ENAMETOOLONG,)
_NO_TEXT = (None, "")


@dataclass(frozen=True, slots=True)
class Caption:
    """Caption that training reads for an image, and its source."""

    text: str | None
    """None if the image has no caption."""
    file: str
    """Caption file; if the image has none, or its caption is in metadata.jsonl, the file to create."""
    seen: FileSeen
    """Contents of the caption file."""
    listed: str | None = None
    """Caption in metadata.jsonl, which is read only if no caption file takes precedence."""
    encoding: str = "utf-8"


@dataclass
class Neighbors:
    """Cache, for one batch, of the caption file names and metadata.jsonl captions in image folders."""

    root: Path
    links: Links = field(init=False)
    _odd: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _listed: dict[Path, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.links = Links([self.root])

    def require_inside(self, file: str) -> None:
        """Raise DatasetError for a link that points outside the dataset, such as to the user's private files."""
        if os.path.islink(long_name(file)) and not self.links.allow(Path(file)):  # noqa: PTH114 (five times as fast)
            raise outside_link_error(file)

    def spelled(self, file: str) -> str | None:
        """Return the existing file whose name differs from `file` only in the case of its suffix, or None.

        Case-sensitive systems do not find such a file by the name `file`.
        """
        folder, wanted = os.path.split(file)
        if folder not in self._odd:
            # Raises if the folder is gone: then it is unknown whether the caption exists.
            names = [path.name for path in long_path(Path(folder)).iterdir()]
            odd = [name for name in names if name.lower().endswith(SUFFIXES) and not name.endswith(SUFFIXES)]
            self._odd[folder] = {Path(name).stem + Path(name).suffix.lower(): name for name in odd}
        name = self._odd[folder].get(wanted)
        return os.path.join(folder, name) if name else None  # noqa: PTH118 (ten times as fast)

    def listed(self, image: Path) -> str | None:
        """Return an image's caption from metadata.jsonl in its folder or at the dataset root, or None."""
        own = self._metadata(image.parent).get(image.name)
        if own is not None or image.parent == self.root:
            return own
        return self._metadata(self.root).get(image.relative_to(self.root).as_posix())

    def _metadata(self, folder: Path) -> Mapping[str, str]:
        if folder not in self._listed:
            path = folder / METADATA_NAME
            self._listed[folder] = read_metadata(path)[0] if self.links.allow_file(path) else {}
        return self._listed[folder]


def outside_link_error(file: str) -> DatasetError:
    """Return the error for reading or writing through a link to outside the dataset."""
    return DatasetError(
        "save.outside",
        f"Could not use {file}: it is a link to outside the dataset.",
        "Replace the link with a copy of the file. Your changes are kept until then.",
    )


def normalized(text: str | None) -> str | None:
    r"""Return a caption normalized for a file: "\n" line endings, no byte order mark, empty if blank."""
    if text is None:
        return None
    text = text.lstrip("\ufeff")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return "" if text.isspace() else text


def read_caption(image: str, around: Neighbors) -> Caption:
    """Return an image's caption as training reads it: the first of .txt, .caption and metadata.jsonl that is not blank.

    Raises OSError, and DatasetError if the file that takes precedence is not text.
    """
    first: Caption | None = None
    stem = os.path.splitext(image)[0]  # noqa: PTH122 (ten times as fast)
    for suffix in SUFFIXES:
        if found := _read(stem + suffix, around):
            if found.text:
                return found
            first = first or found
    listed = around.listed(Path(image))
    if first:
        return Caption(normalized(listed) or "", first.file, first.seen, listed, first.encoding)
    return Caption(normalized(listed), stem + SUFFIXES[0], FileSeen(None), listed)


def _read(file: str, around: Neighbors) -> Caption | None:
    try:
        around.require_inside(file)
        seen = look_at(file, LARGEST + 1)
    except OSError as fault:
        if fault.errno in _INVALID_NAME:
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
            f"Could not read the caption {file}: {fault}.",
            "Move that file away if you do not need it. Your caption is kept until then.",
        ) from fault
    return Caption(normalized(decoded.text), file, seen, encoding=decoded.encoding)


def encode(text: str) -> bytes:
    """Return a caption's bytes for its file; raises DatasetError if training could not read them."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as fault:
        raise _unwritable(f"character {fault.start + 1} is incomplete and cannot be encoded as UTF-8") from fault
    if len(data) > LARGEST:
        raise _unwritable(f"it is longer than {LARGEST:,} bytes")
    if "\0" in text:
        raise _unwritable(f"character {text.index(chr(0)) + 1} is a null character")
    return data


def _unwritable(reason: str) -> DatasetError:
    return DatasetError(
        "caption.unwritable",
        f"Could not save a caption: {reason}.",
        "Fix the caption. It is kept until then.",
    )


_Verdict = Literal["there", "write", "theirs", "conflict"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a save request."""

    request: SaveRequest
    kind: Literal["saved", "conflict", "refused"]
    found: Value = None
    """Value on disk now. If `kind` is "saved" but this is not `request.desired`, the library must be updated."""
    error: DatasetError | None = None
    notice: str | None = None
    """Code of a notice to show once: notice.converted or notice.replaces_list."""


@dataclass(frozen=True, slots=True)
class _Plan:
    request: SaveRequest
    found: Caption
    data: bytes | None
    """New contents of the file; None to remove it."""


class Writer:
    """Writes captions and notes to files; belongs to the saver's thread."""

    def __init__(self, backups: Backups) -> None:
        self._backups = backups
        self._ours: dict[str, int] = {}
        """Hash of what we last wrote to each file; any other contents are backed up before they are overwritten."""
        self._made: set[str] = set()
        """Files created in this session; no other files are ever removed."""
        self._swept: set[str] = set()
        """Folders from which temporary files of killed processes have been removed."""

    def write(self, requests: Sequence[SaveRequest]) -> Iterator[Outcome]:
        """Write requests, at most one per value, and yield the outcome of each as soon as it is known.

        With fewer than ten requests, each file is flushed to disk before its outcome is yielded. With more, files may
        be flushed only when the iteration ends, so the journal must not record any request as saved before that.
        """
        durable = len(requests) < 10 or not SYNCS_FILE_SYSTEM
        for root, group in groupby(sorted(requests, key=lambda request: request.key), lambda request: request.key.root):
            mine = list(group)
            yield from self._write_captions(
                root, [request for request in mine if request.key.field == "caption"], durable
            )
            if not durable:
                with contextlib.suppress(OSError):  # a missing folder is reported with its files
                    sync_file_system(root)
            others = sorted(
                (request for request in mine if request.key.field != "caption"), key=lambda request: request.key.folder
            )
            for folder, values in groupby(others, lambda request: request.key.folder):
                yield from self._write_notes(root, folder, list(values))

    def _write_captions(self, root: str, requests: Sequence[SaveRequest], durable: bool) -> Iterator[Outcome]:
        around = Neighbors(Path(root))
        plans: list[_Plan] = []
        closed: dict[str, DatasetError] = {}
        for request in requests:
            judged = self._plan(request, around, closed)
            if isinstance(judged, Outcome):
                yield judged
            else:
                plans.append(judged)
        # All old contents are backed up in one transaction, before the first file is overwritten.
        try:
            self._backups.keep(root, self._unknown(root, plans))
        except OSError as fault:
            yield from (Outcome(plan.request, "refused", error=_no_backup(fault, root)) for plan in plans)
            return
        for plan in plans:
            yield self._execute(plan, around, closed, durable)

    def _plan(self, request: SaveRequest, around: Neighbors, closed: dict[str, DatasetError]) -> _Plan | Outcome:
        path = request.key.text
        try:
            found = read_caption(path, around)
            verdict = _judge(
                normalized(_text(request.desired)), [normalized(_text(base)) for base in request.bases], found.text
            )
            if verdict == "write":
                return _Plan(request, found, self._data(request, found, around))
        except DatasetError as error:
            return Outcome(request, "refused", error=error)
        except OSError as fault:
            return Outcome(request, "refused", error=_refusal_of_folder(fault, os.path.dirname(path), closed))  # noqa: PTH120 (ten times as fast)
        kind: Literal["saved", "conflict"] = "conflict" if verdict == "conflict" else "saved"
        return Outcome(request, kind, request.desired if verdict == "there" else found.text)

    def _data(self, request: SaveRequest, found: Caption, around: Neighbors) -> bytes | None:
        """Return the new contents of the file, or None to remove it.

        It is removed if there should be no caption or metadata.jsonl contains the same caption. A file that we did not
        create may belong to another program, so it is emptied instead, which has the same effect in training.
        """
        text = normalized(_text(request.desired))
        if found.seen.data is not None and not self._is_ours(found):
            self._made.discard(found.file)  # another program has written it since
        if found.file in self._made and (text is None or normalized(around.listed(request.key.path)) == text):
            return None
        return encode(text or "")

    def _unknown(self, root: str, plans: Iterable[_Plan]) -> Iterator[tuple[str, bytes | None]]:
        """Yield names and contents of files to back up: those to be removed, and those not last written by us."""
        for plan in plans:
            data = plan.found.seen.data
            if plan.data is None or data is None or not self._is_ours(plan.found):
                yield _within(plan.found.file, root), data

    def _is_ours(self, found: Caption) -> bool:
        """Return whether a file still contains what we last wrote to it."""
        return self._ours.get(found.file) == hash(found.seen.data)

    def _execute(self, plan: _Plan, around: Neighbors, closed: dict[str, DatasetError], durable: bool) -> Outcome:
        request, file = plan.request, plan.found.file
        folder = os.path.dirname(file)  # noqa: PTH120 (ten times as fast)
        if folder in closed:  # each further attempt could take seconds
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
            # If this file is empty now, another file or metadata.jsonl may take precedence.
            true = request.desired if plan.data else read_caption(request.key.text, around).text
        except ChangedMeanwhileError:
            return self._retry(request, around, closed, durable)
        except DatasetError as error:
            return Outcome(request, "refused", error=error)
        except OSError as fault:
            return Outcome(request, "refused", error=_refusal_of_folder(fault, folder, closed))
        return Outcome(request, "saved", true, notice=_notice(plan))

    def _sweep(self, root: str, folder: str) -> None:
        if folder not in self._swept:
            self._swept.add(folder)
            within = _within(folder, root)
            sweep(folder, lambda name, data: self._backups.keep(root, [(f"{within}/{name}".lstrip("/"), data)]))

    def _retry(
        self, request: SaveRequest, around: Neighbors, closed: dict[str, DatasetError], durable: bool
    ) -> Outcome:
        """Process a request again from the beginning, because another program has changed the file."""
        judged = self._plan(request, around, closed)
        if isinstance(judged, Outcome):
            return judged
        try:
            self._backups.keep(request.key.root, self._unknown(request.key.root, [judged]))
        except OSError as fault:
            return Outcome(request, "refused", error=_no_backup(fault, request.key.root))
        return self._execute(judged, around, closed, durable)

    def _write_notes(self, root: str, folder: Path, requests: Sequence[SaveRequest]) -> Iterator[Outcome]:

        outcomes: list[Outcome] = []
        due: list[SaveRequest] = []
        try:
            found = read_notes(folder, Neighbors(Path(root)))
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
        except ChangedMeanwhileError:  # start over with the new contents, so that their other values are kept
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
    """Return how to save `desired` if `found` is on disk: only values in `bases` may be overwritten."""
    if found == desired:
        return "there"
    # Here a missing caption and an empty one count as equal, because training treats them alike.
    if found in bases or (found in _NO_TEXT and any(base in _NO_TEXT for base in bases)):
        return "write"
    return "theirs" if desired in bases[:1] else "conflict"


def _note_bases(request: SaveRequest) -> Sequence[Value]:
    # A folder's facts may come from its name, such as 10_cat, and be absent from its notes.
    return (*request.bases, None, False) if request.bases and request.key.of_folder else request.bases


def _text(value: Value) -> str | None:
    assert value is None or isinstance(value, str)
    return value


def _within(file: str, root: str) -> str:
    return file[len(root) :].replace(os.sep, "/").lstrip("/")  # ten times as fast as relative_to


def _notice(plan: _Plan) -> str | None:
    if plan.found.seen.data is None and plan.found.listed is not None and plan.data is not None:
        return "notice.replaces_list"
    return "notice.converted" if plan.found.encoding != "utf-8" else None


def _refusal_of_folder(fault: OSError, folder: str, closed: dict[str, DatasetError]) -> DatasetError:
    return closed.setdefault(folder, refusal(fault, Path(folder)))


def _no_backup(fault: OSError, root: str) -> DatasetError:
    return DatasetError(
        "save.no_backup",
        f"Could not back up {root}: {fault.strerror or fault}. Nothing is overwritten without a backup.",
        f"{write_remedy(fault)} It is Impasto's own folder. Your changes are kept until then.",
    )


@dataclass(frozen=True, slots=True)
class NotesFile:
    """Notes of one folder, and the file contents they were read from."""

    file: Path
    data: bytes | None
    """None if the file does not exist."""
    sidecar: Sidecar

    def value(self, request: SaveRequest) -> Value:
        """Return the current value for a request's key."""
        notes = self.sidecar.folder if request.key.of_folder else self.sidecar.of(request.key.path.name)
        value: Value = getattr(notes, request.key.field)
        return value

    def with_values(self, requests: Sequence[SaveRequest]) -> bytes:
        """Return new file contents with only the requested values changed; raises DatasetError for invalid values."""
        images: dict[str, dict[str, object]] = {}
        facts: dict[str, object] = {}
        for request in requests:
            target = facts if request.key.of_folder else images.setdefault(request.key.path.name, {})
            target[request.key.field] = request.desired
        return sidecar_text(_changed(self.sidecar, facts, images)).encode("utf-8")


def read_notes(folder: Path, around: Neighbors) -> NotesFile:
    """Return a folder's notes; raises OSError, and DatasetError for a damaged file or a link to outside."""
    file = folder / FILE_NAME
    around.require_inside(str(file))
    data = _bytes(file)
    sidecar = read_sidecar(folder)
    while (now := _bytes(file)) != data:  # written between the two reads
        data, sidecar = now, read_sidecar(folder)
    return NotesFile(file, data, sidecar)


def _bytes(file: Path) -> bytes | None:
    try:
        return read_bytes(file, "notes")
    except FileNotFoundError:
        return None


def _changed(sidecar: Sidecar, facts: Mapping[str, object], images: Mapping[str, Mapping[str, object]]) -> Sidecar:
    try:
        return (sidecar.with_folder(**facts) if facts else sidecar).with_images(images)
    except ValueError as fault:  # pydantic's errors are ValueErrors
        raise DatasetError(
            "save.value",
            f"Could not save the image notes: {plain_reason(fault)}.",
            "Undo that change, or choose another value.",
        ) from fault
