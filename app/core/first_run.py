"""Read this PC's GPUs and disk space, run the engine's self-check, and prepare the demo."""

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
from app.core.words import full_message
from trainer.errors import ImpastoError
from trainer.files.assets import asset_path
from trainer.protocol import files, places
from trainer.protocol.files import long_path
from trainer.protocol.reading import parse_toml, read_toml

if TYPE_CHECKING:
    from trainer.gpu import Gpu  # loads the driver's library


Verdict = Literal["ok", "doubtful", "broken"]
_VERDICTS: tuple[Verdict, ...] = ("ok", "doubtful", "broken")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """GPUs and disk space of this PC."""

    gpus: tuple[Gpu, ...]
    fault: str
    """Error message if a GPU driver does not work, else ""."""
    folder: Path
    """Folder for models."""
    free: int | None
    """Free bytes on its disk; None if they cannot be read."""


def read_machine_facts() -> MachineFacts:
    """Return facts from the driver and the disk; takes up to a second, so call it on a worker."""
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
        return (), full_message(error)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result of the engine's check."""

    verdict: Verdict
    sentence: str
    remedy: str


class MachineCheck:
    """Client of `python -m trainer doctor` and its self-test. Use it only on the thread that created it."""

    def __init__(self, post: Post) -> None:
        self.findings: list[CheckResult] = []
        self.problem = ""
        """Message that explains why there are no results; "" if there is no such problem."""
        self.done = False
        self.changed: Emitter[None] = Emitter()
        """Emitted after each result and at the end."""
        self._process = ServedProcess(["doctor", "--json"], post)
        self._process.answered.connect(self._on_answered)
        self._process.ended.connect(self._on_ended)

    def start(self) -> None:
        """Start the check, which takes a few seconds if PyTorch is installed on an SSD."""
        try:
            self._process.send({})
        except OSError as error:
            self._on_ended(str(error))

    def close(self) -> None:
        """Stop the check."""
        self._process.close()

    @property
    def worst(self) -> list[CheckResult]:
        """Return the results with the verdict "broken" or, if there are none, those with "doubtful"."""
        broken = [result for result in self.findings if result.verdict == "broken"]
        return broken or [result for result in self.findings if result.verdict == "doubtful"]

    def _on_answered(self, message: Mapping[str, Any]) -> None:
        if message.get("verdict") in _VERDICTS:
            self.findings.append(
                CheckResult(message["verdict"], str(message.get("sentence")), str(message.get("remedy", "")))
            )
            self.changed.emit(None)

    def _on_ended(self, words: str) -> None:
        self.done = True
        if not self.findings:
            self.problem = words.splitlines()[-1] if words else "The check stopped unexpectedly."
        self.changed.emit(None)


def demo_images() -> Path:
    """Return the per-user folder of demo images after copying missing ones; existing files are kept.

    Takes a few milliseconds for 18 small files.

    Raises:
        OSError: The folder cannot be written.
    """
    folder = places.home() / "demo" / "pictures"
    long_path(folder).mkdir(parents=True, exist_ok=True)
    for source in asset_path("demo", "pictures").iterdir():
        if not long_path(folder / source.name).exists():
            with files.staged(folder / source.name, durable=False) as target:
                shutil.copyfile(source, target)
    return folder


def demo_job(jobs: Path) -> Path:
    """Return the path of the demo's job: the existing one, or a new one in the folder `jobs`. For workers.

    Raises:
        JobError: The job cannot be written.
    """
    from trainer.config.write import demo_job as job_text  # late: it imports the job schema

    values = parse_toml(job_text(places.home() / "demo" / "pictures"))
    earlier = jobs.absolute() / str(values["name"]) / FILE_NAME
    return earlier if _is_usable(earlier) else write_new(jobs, values)


def _is_usable(job: Path) -> bool:
    """Return whether a job can be read and its base still exists.

    The demo's base no longer exists at the same path if Impasto was reinstalled in another folder.
    """
    try:
        return Path(read_toml(job, "text")["base"]["model"]).exists()
    except (OSError, ValueError, KeyError, TypeError):
        return False
