"""Find the settings that open images are judged by, from the job that uses their folders or the preferences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.core.disk.datasets import Datasets
from app.core.events import Emitter
from app.core.health.groups import NATIVE_RESOLUTIONS, JudgingTarget, judging_target
from app.core.jobs.jobs import JobEntry, Jobs
from app.core.settings.preferences import Settings
from app.core.tasks import Tasks, reraise
from trainer.errors import ImpastoError

if TYPE_CHECKING:  # imports pydantic and the schema, which would delay the window
    from app.core.jobs.draft import Draft

KEYS = {"resolution": "recipe.resolution", "tokens": "recipe.token_chunks", "lines": "dataset.lines"}
"""Job key of each field of `JudgingTarget`."""


class _TargetSource(NamedTuple):
    """A judging target and its source: a job, or the preferences if `job` is empty."""

    job: str
    target: JudgingTarget
    native: int | None
    """Native resolution of the job's base; None if there is no job."""


class TargetTracker:
    """Tracker of the judging target for the open folders. Use it only from the thread of `tasks`.

    The target comes from the open job if it uses an open folder, else from the most recently changed job that does,
    else from the preferences, which then apply to the next new job.
    """

    def __init__(self, jobs: Jobs, datasets: Datasets, settings: Settings, tasks: Tasks) -> None:
        self.changed: Emitter[None] = Emitter()
        """Emitted when `target` or `job` changes."""
        self.failed: Emitter[ImpastoError] = Emitter()
        """Emitted when a job could not be opened to change its settings."""
        self._jobs, self._datasets, self._settings, self._tasks = jobs, datasets, settings, tasks
        self._draft: Draft | None = None
        self._natives: dict[tuple[Path, str], int] = {}
        """Native resolutions, by job folder and base, for jobs that state no family; SDXL's until the base is read."""
        self._stop: Callable[[], None] = lambda: None
        self._source = self._find()
        settings.changed.connect(lambda _: self._follow())
        jobs.changed.connect(lambda _: self._follow())
        jobs.opened_changed.connect(self._turn)
        datasets.known.connect(lambda _: jobs.refresh(self._follow))
        datasets.closed.connect(lambda _: self._follow())

    @property
    def target(self) -> JudgingTarget:
        """Return the settings that images and captions are judged by."""
        return self._source.target

    @property
    def job(self) -> str:
        """Return the name of the job that sets `target`; "" if no job uses the open folders."""
        return self._source.job

    def set(self, name: str, value: int | str) -> None:
        """Change a field of `target` in the job that uses the open folders, or in the preferences if there is none."""

        def change(draft: Draft) -> None:
            draft.set(KEYS[name], value)

        if draft := self._open_draft():
            change(draft)
        elif entry := self._latest():
            self._jobs.open(entry.path, change, self.failed.emit)
        else:
            self._settings.set_checks(**{name: value})

    def for_new_job(self) -> dict[str, int | str]:
        """Return the settings, by key, that a new job for the open folders should set: those that are not defaults.

        A resolution that is the native one of the previous job's base is left out, since the new base may differ.
        """
        target, native, judging = self._source.target, self._source.native, self._settings.preferences.judging
        resolution = target.resolution if native else judging.resolution
        stated = {"resolution": resolution, "tokens": target.tokens, "lines": target.lines}
        plain = {"resolution": native, "tokens": JudgingTarget().tokens, "lines": JudgingTarget().lines}
        return {KEYS[name]: value for name, value in stated.items() if value is not None and value != plain[name]}

    # --- internals

    def _follow(self) -> None:
        before, self._source = self._source, self._find()
        if before != self._source:
            self.changed.emit(None)

    def _find(self) -> _TargetSource:
        if draft := self._open_draft():
            native = NATIVE_RESOLUTIONS[draft.family or "sdxl"]
            return _TargetSource(draft.name, judging_target(draft.values, native), native)
        if entry := self._latest():
            native = NATIVE_RESOLUTIONS[entry.family] if entry.family in NATIVE_RESOLUTIONS else self._native(entry)
            return _TargetSource(entry.name, judging_target(entry.stated, native), native)
        judging = self._settings.preferences.judging
        return _TargetSource(
            "", JudgingTarget(judging.resolution or JudgingTarget().resolution, judging.tokens, judging.lines), None
        )

    def _open_draft(self) -> Draft | None:
        draft = self._draft
        sound = draft.valid_part if draft else None
        return draft if sound and self._uses(Path(folder.path) for folder in sound.dataset.folders) else None

    def _latest(self) -> JobEntry | None:
        return next((entry for entry in self._jobs.all if self._uses(entry.folders)), None)

    def _uses(self, folders: Iterable[Path]) -> bool:
        """Return whether any of a job's folders is open, is inside an open folder or contains one."""
        roots = self._datasets.folders
        return any(path.is_relative_to(root) or root.is_relative_to(path) for path in folders for root in roots)

    def _native(self, entry: JobEntry) -> int:
        """Return the native resolution of a job's base; SDXL's until a worker has identified the base."""
        base = entry.path.parent, entry.base
        if base not in self._natives:
            self._natives[base] = NATIVE_RESOLUTIONS["sdxl"]

            def on_identified(native: int) -> None:
                self._natives[base] = native
                self._follow()

            self._tasks.run(lambda: _native_of(*base), on_identified, reraise, kept=False)
        return self._natives[base]

    def _turn(self, draft: Draft | None) -> None:
        self._stop()
        self._draft = draft
        self._stop = draft.changed.connect(lambda _: self._follow()) if draft else lambda: None
        self._follow()


def _native_of(folder: Path, model: str) -> int:
    """Return the native resolution of a base, whose path is relative to `folder`; SDXL's if it cannot be read."""
    from trainer.config.paths import absolute, is_base_path
    from trainer.files.identify import identify_base

    try:
        family = identify_base(Path(absolute(model, folder))).family if is_base_path(model, folder) else "sdxl"
    except (ImpastoError, OSError):
        family = "sdxl"
    return NATIVE_RESOLUTIONS[family]
