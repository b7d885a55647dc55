"""All runs of this user, as the list of runs shows them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait
from pathlib import Path

from app.core.events import Event
from app.core.runs.run import Run
from app.core.runs.summary import RunSummary, Summaries
from app.core.tasks import Post, Single, Tasks, only
from trainer.errors import ImpastoError, RunError
from trainer.protocol import places
from trainer.protocol.run_directory import forget_run, forgotten_runs, known_runs


class Runs:
    """The runs that were started by this user, in the app or not, and those in the folders of his jobs.

    A worker of its own reads them: however long other work takes, a run that died is seen within the next look.
    """

    def __init__(self, post: Post) -> None:
        self.all: list[RunSummary] = []
        """The latest started first."""
        self.changed: Event[None] = Event()
        """`all` is another list now."""
        self.failed: Event[ImpastoError] = Event()
        """Something that was asked could not be done."""
        self.looked = False
        """Whether `all` was read once."""
        self._tasks = Tasks(post, threads=1)
        self._looking = Single(self._tasks)
        self._summaries = Summaries()
        self._shown: set[Path] = set()
        self._forgotten: set[Path] = set()
        """Since the look that runs began, or not yet on disk: what it brings of them is not wanted any more."""
        self._open: dict[Path, Run] = {}
        self._asked: dict[Path, Future[None]] = {}
        """To be forgotten on disk."""

    def look(self) -> None:
        """Read again how all runs stand; nothing when that is on its way."""
        if not self._looking.busy:
            self._forgotten.intersection_update(path for path, one in self._asked.items() if not one.done())
            shown = frozenset(self._shown)
            self._looking.run(lambda: self._read(shown), self._take, kept=False)

    def open(self, path: Path) -> Run:
        """Return a run to watch; the same to all who ask for it until it is closed. It joins the list."""
        path = path.absolute()
        run = self._open.get(path)
        if run is None or run.closed:
            run = self._open[path] = Run(path, self._tasks)
            self._shown.add(path)
        return run

    def stands(self, summary: RunSummary) -> None:
        """Take over how a run stands that was just read by itself."""
        others = [summary if each.path == summary.path else each for each in self.all]
        if others != self.all:
            self.all = others
            self.changed.emit(None)

    def forget(self, path: Path) -> None:
        """Take a run out of the list until it is started again; its folder stays as it is.

        It comes back, and `failed` says why, when that could not be written.
        """
        self._forgotten.add(path)
        self._shown.discard(path)
        self.all = [summary for summary in self.all if summary.path != path]
        self.changed.emit(None)

        def work() -> None:
            forget_run(path)
            self._summaries.forget(path)

        self._asked = {each: one for each, one in self._asked.items() if not one.done()}
        self._asked[path] = self._tasks.run(work, lambda _: None, lambda fault: self._keep(path, fault))

    def close(self) -> None:
        """Watch no more; what was asked is done first."""
        wait(self._asked.values())
        for run in self._open.values():
            run.close()
        self._tasks.close()

    def _read(self, shown: Iterable[Path]) -> list[RunSummary]:
        """On the worker; what was shown before stays in the list when its folder is gone, and says so."""
        paths = dict.fromkeys((*known_runs(), *_beside_jobs(), *shown))
        found = [self._summaries.of(path) for path in paths]
        return sorted(found, key=lambda summary: summary.started, reverse=True)

    def _keep(self, path: Path, fault: BaseException) -> None:
        """A run could not be taken out of the list."""
        self._forgotten.discard(path)
        self._shown.add(path)
        self.look()
        only(RunError, self.failed.emit)(fault)

    def _take(self, found: list[RunSummary]) -> None:
        found = [summary for summary in found if summary.path not in self._forgotten]
        self._shown.update(summary.path for summary in found)
        if found != self.all or not self.looked:
            self.looked = True
            self.all = found
            self.changed.emit(None)


def _beside_jobs() -> Iterable[Path]:
    """Yield the runs in the folders of this user's jobs, which a list that was lost does not name."""
    forgotten = forgotten_runs()
    for marker in sorted((places.home() / "jobs").glob("*/runs/*/run.json")):
        if marker.parent not in forgotten:
            yield marker.parent
