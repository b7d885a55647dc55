"""Every file that Impasto reads, with twenty bad contents and things that are not files: no command fails on one.

A command may refuse its own input, by name and with words. It may not crash, hang, or hide the members of a collection
that are sound. A new file or a new reader of one belongs in FILES.
"""

from __future__ import annotations

import shutil
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.bad_contents import BAD, SPECIAL, make_special
from tests.support.images import PHOTOS
from tests.support.jobs import write_job
from tests.support.presets import preset
from tests.support.raw import write_shapes
from tests.support.runs import write_checkpoint, write_run
from trainer import cli
from trainer.config.presets.preset import dump_preset
from trainer.errors import EXIT_FAULT
from trainer.protocol import places
from trainer.protocol.queue import Queue

pytestmark = pytest.mark.usefixtures("quick_commands")

SECONDS = 30


@dataclass(frozen=True)
class Reader:
    """A command that reads a file; `sound` is what it says of the other members of a collection all the same."""

    words: str
    sound: str = ""


RUN = (
    Reader("runs", sound="good"), Reader("queue list", sound="other"),
    Reader("watch runs/bad"), Reader("save runs/bad"),
)  # fmt: skip
QUEUE = (Reader("queue list", sound="other"), Reader("queue list --json", sound="other"), Reader("queue hold"))
DATASET = (Reader("check pictures"), Reader("check job/job.toml"))
PRESETS = (
    Reader("presets list", sound="good preset"), Reader("presets show mine"),
    Reader("presets check home/presets/mine.toml"), Reader("presets add home/presets/mine.toml --yes"),
)  # fmt: skip
MODEL = (Reader("inspect model.safetensors"),)
FILES: dict[str, tuple[Reader, ...]] = {
    **{f"runs/bad/{name}": RUN for name in ("run.json", "status.json", "events.jsonl", "report.json", "forecast.json")},
    **{f"runs/bad/{name}": RUN for name in ("job.toml", "dataset.jsonl", "console.log", "lock")},
    "runs/bad/checkpoints/step-00000500/manifest.json": RUN,
    "runs/bad/commands/00000000000000000001-000000-save-00000000.json": RUN,
    "home/runs.jsonl": (Reader("runs"), Reader("queue list", sound="other"), Reader("watch bad")),
    "home/queue/queue.json": QUEUE,
    "home/queue/entries/00000001.json": QUEUE,
    "home/hashes.json": MODEL,
    "home/presets/mine.toml": PRESETS,
    "job/job.toml": (
        Reader("check job/job.toml"),
        Reader("queue add job/job.toml"),
        Reader("presets share job/job.toml --out preset.toml"),
    ),
    "pictures/impasto.jsonl": DATASET,
    "pictures/metadata.jsonl": DATASET,
    "pictures/a.txt": DATASET,
    "pictures/b.png": (Reader("check pictures", sound="1 "),),
    "kohya.toml": (Reader("check kohya.toml"),),
    "onetrainer.json": (Reader("check onetrainer.json"),),
    "model.safetensors": MODEL,
    "diffusers/model_index.json": (Reader("inspect diffusers"),),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world in which all is well."""
    world = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMPASTO_HOME", str(world / "home"))
        make_pictures(world)
        (world / "home" / "presets").mkdir(parents=True)
        write_shapes(world / "model.safetensors", {"a.lora_up.weight": (4, 4)})
        for name in ("mine", "good"):
            (world / f"home/presets/{name}.toml").write_text(
                dump_preset(preset(name=f"{name} preset")), encoding="utf-8"
            )
    return world


def make_pictures(world: Path) -> None:
    (world / "pictures").mkdir()
    shutil.copy(PHOTOS / "page.png", world / "pictures" / "a.png")
    (world / "pictures" / "a.txt").write_text("a page", encoding="utf-8")
    write_job(world / "job", world / "model.safetensors", world / "pictures")


@pytest.fixture
def world(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, with runs and a queue."""
    world = tmp_path / "world"
    shutil.copytree(sound, world)
    monkeypatch.setenv("IMPASTO_HOME", str(world / "home"))
    monkeypatch.chdir(world)
    write_run(world / "runs", "good", steps=40)
    bad = write_run(world / "runs", "bad", steps=40, state="paused")
    write_checkpoint(bad, 500)
    job = write_job(world / "job", world / "model.safetensors", world / "pictures")
    queue = Queue()
    queue.add(job)
    other = write_job(world / "other job", world / "model.safetensors", world / "pictures", name="other")
    queue.add(other)
    queue.add_run(bad.path)
    first = queue.entries()[0].id
    (world / "home/queue/entries" / f"{first}.json").rename(world / "home/queue/entries/00000001.json")
    queue.hold("asked")
    (world / "diffusers").mkdir()
    return world


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail when the block takes longer, such as one that waits at a pipe; nothing of that kind is on Windows."""

    def late(number: int, frame: types.FrameType | None) -> None:
        raise AssertionError(f"it took more than {seconds} seconds")

    if sys.platform == "win32":
        yield
        return
    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def bad_ones(path: Path) -> Iterator[str]:
    """Make the file each bad thing in turn, and yield what it is."""
    sound = path.read_bytes() if path.is_file() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, data in BAD.items():
        path.write_bytes(data)
        yield name
    for kind in SPECIAL:
        if make_special(path, kind):
            yield kind
            path.rmdir() if path.is_dir() else path.unlink()
    if sound is not None:
        path.write_bytes(sound)


@pytest.mark.parametrize("name", FILES)
def test_no_command_fails_on_a_bad_file(world: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for what in bad_ones(world / name):
        for reader in FILES[name]:
            capsys.readouterr()
            try:
                with within(SECONDS):
                    code = cli.main(reader.words.split())
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is named below
                wrong.append(f"{what}: `{reader.words}` raised {error!r}")
                continue
            said = "".join(capsys.readouterr())
            if code == EXIT_FAULT or "Traceback" in said:
                fault = (places.home() / "fault.txt").read_text(encoding="utf-8") if code == EXIT_FAULT else ""
                wrong.append(f"{what}: `{reader.words}` ended with {code}: {said[-400:]} {fault[-600:]}")
            elif reader.sound not in said:
                wrong.append(f"{what}: `{reader.words}` hides the others: {said[-400:]}")
    assert not wrong, "\n".join(wrong)
