"""What this PC has for training: its graphics cards, its room, and what the engine's own check says of it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from app.core.engine import ServedProcess
from app.core.events import Emitter
from app.core.jobs.jobs import FILE_NAME, write_new
from app.core.tasks import Post
from app.core.words import in_words
from trainer.errors import ImpastoError
from trainer.files.assets import asset_path
from trainer.protocol import files, places
from trainer.protocol.files import long_path
from trainer.protocol.reading import parse_toml, read_toml

if TYPE_CHECKING:
    from trainer.gpu import Gpu  # with the driver's library


Verdict = Literal["ok", "doubtful", "broken"]
_VERDICTS: tuple[Verdict, ...] = ("ok", "doubtful", "broken")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """`fault` says in words what is wrong with the driver, else ""; `free` are the bytes left where models will lie."""

    gpus: tuple[Gpu, ...]
    fault: str
    folder: Path
    free: int | None


def this_machine() -> MachineFacts:
    """Ask the driver and the disk; takes up to a second, so it belongs on a worker."""
    folder = places.home()
    try:
        free: int | None = places.free_bytes(folder)
    except OSError:
        free = None
    gpus, fault = _gpus()
    return MachineFacts(gpus, fault, folder, free)


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    from trainer import gpu

    try:
        return tuple(gpu.list_gpus()), ""
    except ImpastoError as error:
        return (), in_words(error)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One thing that the engine's check found."""

    verdict: Verdict
    sentence: str
    remedy: str


class CheckUp:
    """`python -m trainer doctor` in a process of its own, with its self test; belongs to the thread that makes it."""

    def __init__(self, post: Post) -> None:
        self.findings: list[CheckResult] = []
        self.problem = ""
        """Why there is no answer, in words."""
        self.done = False
        self.changed: Emitter[None] = Emitter()
        """Another finding, or the end."""
        self._child = ServedProcess(["doctor", "--json"], post)
        self._child.answered.connect(self._hear)
        self._child.ended.connect(self._end)

    def start(self) -> None:
        """Begin; a few seconds with PyTorch on an SSD."""
        try:
            self._child.ask({})
        except OSError as error:
            self._end(str(error))

    def close(self) -> None:
        """End it, answers or none."""
        self._child.close()

    @property
    def worst(self) -> list[CheckResult]:
        """What keeps training from working, else what is doubtful."""
        broken = [one for one in self.findings if one.verdict == "broken"]
        return broken or [one for one in self.findings if one.verdict == "doubtful"]

    def _hear(self, said: Mapping[str, Any]) -> None:
        if said.get("verdict") in _VERDICTS:
            self.findings.append(CheckResult(said["verdict"], str(said.get("sentence")), str(said.get("remedy", ""))))
            self.changed.emit(None)

    def _end(self, words: str) -> None:
        self.done = True
        if not self.findings:
            self.problem = words.splitlines()[-1] if words else "The check stopped unexpectedly."
        self.changed.emit(None)


def demo_images() -> Path:
    """Return the folder with the demo's pictures in the per-user folder; what the user changed there stays.

    Raises OSError where it cannot be written. Takes some milliseconds: 18 small files.
    """
    folder = places.home() / "demo" / "pictures"
    long_path(folder).mkdir(parents=True, exist_ok=True)
    for source in asset_path("demo", "pictures").iterdir():
        if not long_path(folder / source.name).exists():
            with files.staged(folder / source.name, durable=False) as target:
                shutil.copyfile(source, target)
    return folder


def demo_job(jobs: Path) -> Path:
    """Return the demo's job: that of an earlier tour as it is now, else a new one in the folder of jobs; on a worker.

    Raises JobError.
    """
    from trainer.config.write import demo_job as text  # brings the schema

    values = parse_toml(text(places.home() / "demo" / "pictures"))
    earlier = jobs.absolute() / str(values["name"]) / FILE_NAME
    return earlier if _is_whole(earlier) else write_new(jobs, values)


def _is_whole(job: Path) -> bool:
    """Tell whether a job can be read and its base is still there: Impasto may have been installed anew elsewhere."""
    try:
        return Path(read_toml(job, "text")["base"]["model"]).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False
