"""Run directory: the folder that contains a run and is the only interface between its engine and watchers."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import shutil
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from trainer.errors import ImpastoError, RunError
from trainer.protocol import files, locks, places
from trainer.protocol.commands import unread, void
from trainer.protocol.events import Phase, cut_torn_line
from trainer.protocol.files import long_path, numbered, safe_name
from trainer.protocol.reading import (
    UnusableFileError,
    parse_json,
    path_of,
    read_record,
    read_text,
    read_toml,
    reason_of,
    table,
)
from trainer.protocol.records import build, json_keys, moment, renamed, to_record

State = Literal["running", "paused", "stopped", "done", "failed"]
MemorySnapshot = Literal["load", "first-steps", "out-of-memory", "end"]
"""Moment at which a memory snapshot is saved."""

_LIST_PATIENCE = 10.0  # seconds; a writer locks the list of runs for milliseconds
_FORGOTTEN = "forgotten"
_SURE_START = 32
"""Characters of a job's name that its runs' folders have too, however long the name is."""
MANIFEST = "manifest.json"


@json_keys("state", "phase", "step", "steps", "attempt", "heartbeat")
@dataclass(frozen=True)
class Status:
    """Progress of a run, rewritten every few seconds; only the run's lock shows whether its engine is alive."""

    state: State
    phase: Phase | None
    step: int
    steps: int
    attempt: int
    heartbeat: float
    """Unix time in seconds."""


class RunDirectory:
    """Folder of a run and the paths in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.job = path / "job.toml"
        self.listing = path / "dataset.jsonl"
        self.run = path / "run.json"
        self.status = path / "status.json"
        self.forecast = path / "forecast.json"
        self.report = path / "report.json"
        self.events = path / "events.jsonl"
        self.console = path / "console.log"
        self.commands = path / "commands"
        self.checkpoints = path / "checkpoints"
        self.samples = path / "samples"
        self.output = path / "output"
        self.lock = path / "lock"
        self._leftovers: frozenset[str] = frozenset()
        """File names of commands sent before this process locked the run; later commands are meant for this attempt."""

    @classmethod
    def create(cls, parent: Path, name: str) -> RunDirectory:
        """Create the folder of a new run in `parent` and add it to the user's list of runs.

        The name is made safe for every system and gets "-2", "-3", … if it is taken. Raises RunError, and leaves
        nothing behind, if the folder or the list cannot be written.
        """
        try:
            run = cls(_make_free_folder(parent.absolute(), safe_name(name, "run")))
            try:
                run._lay_out()
                _enter_in_list(run.path)
            except BaseException:  # also Ctrl-C: a half-made run would block its name
                shutil.rmtree(long_path(run.path), ignore_errors=True)
                raise
        except OSError as error:
            raise _unmade(parent, places.unwritable(parent) or error) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the run in the folder `path`; raises RunError if it is not a run."""
        run = cls(path.absolute())
        if not long_path(run.run).is_file():
            raise RunError(
                "run.none",
                f"{path} is not a run: it contains no run.json."
                if long_path(path).is_dir()
                else f"There is no run at {path}.",
                "`runs` lists the runs on this PC.",
            )
        return run

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the run's lock while its engine runs; raises RunError "run.busy" if another engine holds it.

        The system releases the lock however the process ends. The traceback of an unexpected error is written to the
        console log, and the error gets the attribute `traceback_kept`, a sentence that names the log.
        """
        with contextlib.ExitStack() as stack:
            try:
                # Listed before the lock is taken: commands sent from now on are meant for this attempt.
                self._leftovers = unread(self.commands)
                stack.enter_context(locks.hold_lock(self.lock, locks.CHECK_PATIENCE))
            except locks.LockBusyError as error:
                raise RunError(
                    "run.busy",
                    f'The run "{self.name}" is already running in another process.',
                    "Follow it with `watch`, or stop it first with `stop`.",
                ) from error
            except OSError as error:
                raise RunError(
                    "run.lock",
                    f"Could not use the run's lock file {self.lock}: {error.strerror or error}.",
                    "Move the run to a writable disk that supports file locks; some network shares do not.",
                ) from error
            with self._faults_recorded():
                yield

    def memory_snapshot(self, moment: MemorySnapshot) -> Path:
        """Return the file of the memory snapshot saved at a moment; a later attempt replaces it."""
        return self.path / f"memory-snapshot-{moment}.pickle"

    def is_alive(self) -> bool:
        """Return whether an engine is running the run, in this process or another one."""
        return locks.is_held(self.lock)

    def state(self) -> State | Literal["new", "interrupted"]:
        """Return the run's state: "interrupted" if its engine stopped unexpectedly, "new" if none ever started."""
        if self.is_alive():
            return "running"
        status = self.read_status()
        if status is None:
            return "interrupted" if self.attempts() else "new"
        # Running without the lock: the engine was killed before it could write how it ended.
        return "interrupted" if status.state == "running" else status.state

    def begin_attempt(self, facts: Mapping[str, object]) -> int:
        """Add an attempt to run.json and return its number, from 1; call this while the run is locked.

        `facts` are JSON values such as versions, device and threads. Also cleans up after a killed attempt: a
        partial event line, temporary files and unread commands.
        """
        cut_torn_line(self.events)
        for folder in (self.path, self.checkpoints, self.samples, self.output):
            files.remove_temporary_files(folder)
        void(self.commands, self._leftovers)
        record = self._record()
        number = len(self.attempts()) + 1
        started = {"number": number, "pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
        files.write_json(self.run, record | {"attempts": [*self.attempts(), started | dict(facts)]})
        _enter_in_list(self.path)
        return number

    @property
    def created(self) -> float:
        """Return when the run was created, in seconds since the epoch; 0 if run.json does not say it."""
        created = self._record().get("created")
        return float(created) if isinstance(created, int | float) else 0.0

    def attempts(self) -> list[dict[str, object]]:
        """Return the facts about each attempt from run.json, in order."""
        attempts = self._record().get("attempts", [])
        return [_attempt(each) for each in attempts if isinstance(each, dict)] if isinstance(attempts, list) else []

    def write_user_recipe(self, recipe: Mapping[str, object]) -> None:
        """Store the recipe as the user wrote it; the frozen job contains all resolved values instead."""
        files.write_json(self.run, self._record() | {"typed": dict(recipe)})

    def read_user_recipe(self) -> dict[str, object] | None:
        """Return the recipe as the user wrote it; None for a run that an earlier version started."""
        typed = self._record().get("typed")
        return renamed(typed, "recipe") if isinstance(typed, dict) else None

    def write_status(self, status: Status) -> bool:
        """Replace status.json and return whether that succeeded; a failed heartbeat must not end a run."""
        try:
            # Not synced to disk: that could take 50 ms every few seconds, for a file that is soon replaced anyway.
            files.write_json(self.status, to_record(status), durable=False)
        except OSError:
            return False
        return True

    def read_status(self) -> Status | None:
        """Return the last status; None if it is missing or unreadable."""
        try:
            return read_record(self.status, "record", _status)
        except (OSError, UnusableFileError):
            return None

    def status_fault(self) -> str:
        """Return a sentence that says why status.json cannot be read; "" if it is valid or missing."""
        try:
            read_record(self.status, "record", _status)
        except FileNotFoundError:
            return ""
        except (OSError, UnusableFileError) as error:
            return f"Could not read {self.status}: {reason_of(error)}, so the outcome of this run is unknown."
        return ""

    def _lay_out(self) -> None:
        for folder in (self.commands / "done", self.checkpoints, self.samples, self.output):
            long_path(folder).mkdir(parents=True)
        files.write_json(self.run, {"name": self.name, "created": time.time(), "attempts": []})

    def _record(self) -> dict[str, object]:
        try:
            return read_record(self.run, "record", table)
        except (OSError, UnusableFileError) as error:
            raise damaged(self.run, reason_of(error)) from error

    @contextlib.contextmanager
    def _faults_recorded(self) -> Iterator[None]:
        try:
            yield
        except ImpastoError:
            raise
        except Exception as error:
            with contextlib.suppress(OSError), long_path(self.console).open("a", encoding="utf-8", newline="\n") as log:
                traceback.print_exception(error, file=log)
                vars(error)["traceback_kept"] = f"The traceback is in {self.console}."
            raise


def _status(found: Any) -> Status:
    status = build(Status, found)
    return dataclasses.replace(status, heartbeat=moment(status.heartbeat))


def _attempt(facts: dict[str, object]) -> dict[str, object]:
    """Return the facts about an attempt, omitting a start time that is not a valid date."""
    try:
        return facts if "started" not in facts else facts | {"started": moment(facts["started"])}
    except (ValueError, TypeError):
        return {key: value for key, value in facts.items() if key != "started"}


def require_writable(parent: Path) -> None:
    """Raise the same RunError as `RunDirectory.create` if `parent` cannot be written; creates nothing."""
    if why := places.unwritable(parent):
        raise _unmade(parent, why)


def known_runs() -> list[Path]:
    """Return the folders of this user's runs that still exist, most recently started first."""
    try:
        lines = read_text(places.runs_list(), "list").split("\n")
    except (OSError, UnusableFileError):
        return []
    paths = dict.fromkeys(_listed_path(line) for line in reversed(lines))
    return [path for path in paths if path is not None and long_path(path / "run.json").is_file()]


def forgotten_runs() -> set[Path]:
    """Return the folders of runs that the user removed from the list, including those started again since."""
    try:
        lines = read_text(places.runs_list(), "list").split("\n")
    except (OSError, UnusableFileError):
        return set()
    return {path for line in lines if (path := _listed_path(line, _FORGOTTEN)) is not None}


def forget_run(path: Path) -> None:
    """Remove a run from the user's list until it is started again; its folder is not changed.

    Raises RunError if the list cannot be written.
    """
    target = places.runs_list()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locks.hold_lock(target.with_suffix(".lock"), patience=_LIST_PATIENCE):
            text = read_text(target, "list") if target.exists() else ""
            lines = filter(None, text.split("\n"))  # not splitlines: a path may contain U+2028
            kept = [line for line in lines if path not in (_listed_path(line), _listed_path(line, _FORGOTTEN))]
            kept.append(json.dumps({_FORGOTTEN: str(path)}, ensure_ascii=False))
            files.write_text(target, "\n".join(kept) + "\n")
    except (OSError, UnusableFileError, locks.LockBusyError) as error:
        raise _list_unwritable(error) from error


def find_run(text: str) -> RunDirectory:
    """Return the run that `text` refers to: a path, a name in ./runs, or a name in the user's list of runs.

    Raises RunError if there is no such run, suggesting similar names, or if there are several, listing their paths.
    """
    for path in (Path(text), Path("runs") / text):
        if long_path(path / "run.json").is_file():
            return RunDirectory.open(path)
    named = [path for path in known_runs() if path.name == text]
    if len(named) > 1:
        listed = ", ".join(str(path) for path in named)
        raise RunError(
            "run.ambiguous", f'Several runs are called "{text}": {listed}.', "Specify the path of the one you mean."
        )
    if not named:
        raise _unknown(text)
    return RunDirectory.open(named[0])


def newest_run(parent: Path, name: str) -> RunDirectory | None:
    """Return the newest run in `parent` of a job called `name` that an engine ever started; None if there is none.

    Raises OSError.
    """
    # The frozen jobs tell them apart; folders of other names are passed over, because parsing each job would take time.
    start = safe_name(name, "run")[:_SURE_START]
    folders = long_path(parent).iterdir() if long_path(parent).is_dir() else ()
    alike = [RunDirectory(parent.absolute() / folder.name) for folder in folders if folder.name.startswith(start)]
    runs = [run for run in alike if long_path(run.run).is_file() and _job_name(run) == name and run.attempts()]
    return max(runs, key=lambda run: run.created, default=None)


def _job_name(run: RunDirectory) -> str:
    """Return the name in a run's frozen job; empty if it cannot be read."""
    with contextlib.suppress(OSError, UnusableFileError):
        return str(read_toml(run.job, "config").get("name", ""))
    return ""


def _unmade(parent: Path, error: OSError) -> RunError:
    return RunError(
        "run.folder",
        f"Could not create the run's folder in {parent}: {error.strerror or error}.",
        f"{places.write_remedy(error)} output.runs in the job sets the folder of its runs.",
    )


def _unknown(text: str) -> RunError:
    names = list(dict.fromkeys(path.name for path in known_runs()))
    near = difflib.get_close_matches(text, names, n=3)
    remedy = f"Did you mean {' or '.join(near)}? " if near else ""
    return RunError("run.unknown", f'There is no run called "{text}".', remedy + "`runs` lists the runs on this PC.")


def damaged(path: Path, reason: str) -> RunError:
    """Return the error for an unusable run.json."""
    return RunError(
        "run.damaged",
        f"Could not read the run's history in {path}: {reason}.",
        "Start the job again with `train`; the LoRA files in the run's output folder are unchanged.",
    )


def _make_free_folder(parent: Path, name: str) -> Path:
    long_path(parent).mkdir(parents=True, exist_ok=True)
    names = numbered(name)
    while True:
        path = parent / next(names)
        with contextlib.suppress(FileExistsError):
            long_path(path).mkdir()
            return path


def _enter_in_list(path: Path) -> None:
    target = places.runs_list()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Windows emulates appending by seeking first: without the lock, two writers could overwrite each other.
        with (
            locks.hold_lock(target.with_suffix(".lock"), patience=_LIST_PATIENCE),
            target.open("a", encoding="utf-8", newline="\n") as file,
        ):
            file.write(json.dumps({"path": str(path), "time": time.time()}, ensure_ascii=False) + "\n")
    except (OSError, locks.LockBusyError) as error:
        raise _list_unwritable(error) from error


def _list_unwritable(error: Exception) -> RunError:
    return RunError(
        "run.list",
        f"Could not write the list of runs {places.runs_list()}: {error}.",
        "Make that folder writable, or set the environment variable IMPASTO_HOME to another one.",
    )


def _listed_path(line: str, key: str = "path") -> Path | None:
    try:
        return path_of(parse_json(line)[key])
    except (ValueError, LookupError, TypeError):
        return None


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint at `step`, such as step-00000500."""
    return f"step-{step:08d}"


def steps_on_disk(parent: Path) -> list[int]:
    """Return the steps that have a finished checkpoint folder, lowest first."""
    names = [path.name.removeprefix("step-") for path in long_path(parent).glob("step-*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def read_manifest(folder: Path) -> Mapping[str, Mapping[str, object]]:
    """Return the size and hash of each file in a checkpoint; raises OSError and UnusableFileError."""
    return read_record(folder / MANIFEST, "record", _manifest)


def _manifest(found: Any) -> dict[str, dict[str, object]]:
    stated = {str(name): {"bytes": facts["bytes"], "sha256": facts["sha256"]} for name, facts in found["files"].items()}
    if not all(PurePath(name).name == name for name in stated):
        raise ValueError("it names a file outside its folder")
    return stated


def sizes_match(folder: Path, manifest: Mapping[str, Mapping[str, object]]) -> bool:
    """Return whether every file of the manifest exists with the right size; raises OSError."""
    paths = {long_path(folder / name): facts["bytes"] for name, facts in manifest.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())


def newest_step(parent: Path) -> int | None:
    """Return the step of the newest complete checkpoint; None if there is none.

    Only file sizes are checked here, for speed; the engine also verifies the hashes when it resumes.
    """
    return next((step for step in reversed(steps_on_disk(parent)) if _is_whole(parent / folder_name(step))), None)


def _is_whole(folder: Path) -> bool:
    try:
        return sizes_match(folder, read_manifest(folder))
    except (OSError, ValueError):
        return False
