"""One job file on disk: read with words for what is wrong, written behind, never over what somebody else wrote."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from app.core.events import Event
from app.core.jobs.values import Values, to_toml
from app.core.tasks import Tasks, only
from trainer.config.load import JOB_FILE, migrate, read_job_text
from trainer.config.toml_file import parse_toml
from trainer.errors import JobError
from trainer.protocol import files
from trainer.protocol.files import long_path, numbered
from trainer.protocol.places import is_disk_full, write_remedy
from trainer.protocol.reading import read_bytes


def parse_values(text: str, source: str) -> Values:
    """Return what a job file's text holds, in the present schema's form; JobError for broken and newer ones."""
    return migrate(parse_toml(text, source, JOB_FILE))


def read_values(path: Path) -> Values:
    """Return what a job file holds, without a password or token in its base link.

    Raises JobError when the file is missing, unreadable, damaged or of a newer version.
    """
    return parse_values(read_job_text(path), path.name)


class JobFile:
    """Writes a job's values on a worker, the latest last; belongs to the thread of `tasks`.

    The file holds what was typed, wrong or not: opened again, the form shows the same, and the trainer names what is
    wrong as the form does. What the app did not write itself (comments, another program's changes) is kept beside
    before it is written over.
    """

    def __init__(self, path: Path, tasks: Tasks) -> None:
        self.path = path
        self.written: Event[None] = Event()
        """All that was handed over is on disk."""
        self.failed: Event[JobError] = Event()
        """It cannot be written now; the next change tries again, and so does `retry`."""
        self.mended: Event[JobError] = Event()
        """What `failed` told is over: all is on disk, or something else stands against it."""
        self.kept: Event[Path] = Event()
        """Where the file as it was before lies now."""
        self._tasks = tasks
        self._own: str | None = None
        self._waiting: str | None = None
        self._writing: tuple[str, Future[Path | None]] | None = None
        self._fault: JobError | None = None
        """What `failed` told last, until it is over."""
        self._quiet = False
        """Whether nobody waits for what comes of the writing that is under way: it is only tried again."""

    @property
    def unsaved(self) -> bool:
        """Tell whether something is still on its way to the disk."""
        return self._waiting is not None or self._writing is not None

    @property
    def fault(self) -> JobError | None:
        """What stands against writing it; None where nothing does that is known."""
        return self._fault

    def parse(self, text: str) -> Values:
        """Return what a text of this file holds; raises JobError."""
        return parse_values(text, self.path.name)

    def own(self, values: Values) -> None:
        """Take these values for what the file holds, so that another file is told from it."""
        self._own = to_toml(values)

    def is_own(self, text: str) -> bool:
        """Tell whether a text is what this app wrote, or would have written."""
        return text == self._own

    def write(self, values: Values) -> None:
        """Put these values on disk soon."""
        self._waiting, self._quiet = to_toml(values), False
        if self._writing is None:
            self._begin()

    def retry(self) -> None:
        """Try again what could not be written; that it fails once more for the same reason is not told again."""
        if self._waiting is not None and self._writing is None:
            self._quiet = True
            self._begin()

    def settle(self, then: Callable[[JobError | None], None]) -> None:
        """Call `then` when nothing is on its way to the disk any more, with what stands against it, tried once more."""
        if not self.unsaved:
            then(None)
            return

        def over(error: JobError | None) -> None:
            for stop in stops:
                stop()
            then(error)

        stops = [self.written.connect(over), self.failed.connect(over)]
        self._quiet = False
        if self._writing is None:
            self._begin()

    def flush(self) -> None:
        """Put on disk what is not there yet, now; raises JobError when it cannot be. Only for the app's end."""
        if self._writing is not None:
            sent, future = self._writing
            if not future.cancelled() and future.exception() is None:  # waits
                self._own = sent
        text, self._waiting = self._waiting, None
        if text is not None and text != self._own:
            try:
                _replace(self.path, text, self._own)
            except OSError as error:
                raise _unwritable(self.path, error) from None
            self._own = text
        self.written.emit(None)  # for whoever waits in `settle`

    def _begin(self) -> None:
        text, former = self._waiting, self._own
        assert text is not None
        future = self._tasks.run(
            lambda: _replace(self.path, text, former), lambda kept: self._done(text, kept), self._fail
        )
        self._writing = text, future

    def _done(self, text: str, kept: Path | None) -> None:
        self._writing, self._own = None, text
        if kept:
            self.kept.emit(kept)
        if self._waiting == text:
            self._waiting = None
        fault, self._fault = self._fault, None
        if fault:
            self.mended.emit(fault)
        if self._waiting is None:
            self.written.emit(None)
        else:
            self._begin()

    def _fail(self, fault: BaseException) -> None:
        self._writing = None
        only(OSError, self._tell)(fault)

    def _tell(self, error: OSError) -> None:
        former, fault = self._fault, _unwritable(self.path, error)
        another = former is None or former.sentence != fault.sentence
        if self._quiet and not another:
            return
        self._fault = fault
        if former and another:
            self.mended.emit(former)
        self.failed.emit(fault)


def _replace(path: Path, text: str, own: str | None) -> Path | None:
    """Write the file in one step; return where the former one was kept, if it was not what we had written."""
    long_path(path.parent).mkdir(parents=True, exist_ok=True)
    kept = _keep(path, own)
    files.write_text(path, text)
    return kept


def _keep(path: Path, own: str | None) -> Path | None:
    try:
        there = read_bytes(path, "text")
    except FileNotFoundError:
        return None
    if own is not None and there == own.encode():
        return None
    names = (path.with_name(f"{stem}{path.suffix}") for stem in numbered(f"{path.stem}.before"))
    target = next(name for name in names if not long_path(name).exists())
    files.write_bytes(target, there)
    return target


def _unwritable(path: Path, error: OSError) -> JobError:
    reason = "the disk is full" if is_disk_full(error) else error.strerror or error
    return JobError(
        "job.unwritable",
        f"{path} cannot be written: {reason}.",
        f"{write_remedy(error)} Your changes are kept here and saved when that is possible; or duplicate the job.",
    )
