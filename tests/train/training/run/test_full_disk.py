"""A disk that fills up anywhere pauses the run in words, and once there is room it gives the undisturbed LoRA.

The system refuses to let any file grow past a limit, as a full disk does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from tests.train.training.run.test_run import Watcher, run_of, same_lora, train
from trainer.errors import ResumableError
from trainer.protocol import events, places
from trainer.protocol.run_directory import RunDirectory
from trainer.training.reporting import reporter
from trainer.training.run.resume import resume
from trainer.training.run.start import start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit on file sizes")

SETTINGS = ["recipe.layers=attention", "recipe.steps=3", "report.previews.every=2", "report.saving.checkpoint_every=1"]


@contextmanager
def full_disk(limit_at: Callable[[events.Event], int | None]) -> Iterator[Callable[[events.Event], None]]:
    """Gives what watches a run: no file may grow past the bytes that ``limit_at`` says at an event, if it does."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def watch(event: events.Event) -> None:
        if (limit := limit_at(event)) is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    try:
        yield watch
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def at_phase(phase: events.Phase, limit: int) -> Callable[[RunDirectory, events.Event], int | None]:
    """The disk is full from the moment a phase begins."""
    return lambda run, event: limit if isinstance(event, events.PhaseStarted) and event.phase == phase else None


def in_the_events(run: RunDirectory, event: events.Event) -> int | None:
    """The disk is full amid the line that comes after the second step's."""
    full = isinstance(event, events.StepEvent) and event.step == 2
    return run.events.stat().st_size + 40 if full else None


def amid_loading(run: RunDirectory, event: events.Event) -> int | None:
    """The disk is full amid the line that tells how much of a model has been read."""
    full = isinstance(event, events.PhaseStarted) and event.phase == "load"
    return run.events.stat().st_size + 40 if full else None


# Each limit is above what was written before and below what comes next: latents take 2 kB, embeddings 10, a preview 8.
# Then the disk that is named, what there is by then, and what not.
MOMENTS = {
    "loading the base": (amid_loading, "test", "run/run.json", "run/checkpoints/*"),
    "a cached picture": (at_phase("cache_pictures", 1500), "pictures", "run/run.json", "cache/pictures/*/*"),
    "a cached text": (at_phase("cache_texts", 5000), "texts", "cache/pictures/*/*", "cache/texts/*/*"),
    "a preview": (at_phase("preview", 6000), "test", "run/checkpoints/step-00000000", "run/samples/*"),
    "the events": (in_the_events, "test", "run/checkpoints/step-00000001", "run/checkpoints/step-00000002"),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    photographs(folder / "pictures", count=3)
    return folder


@pytest.fixture(scope="module")
def undisturbed(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMPASTO_HOME", str(tmp_path_factory.mktemp("home of the undisturbed")))
        base = tiny_base("sd15", shared / "bases", depth=1)
        return train(write_job(shared / "job", base, shared / "pictures"), SETTINGS)


@pytest.fixture(autouse=True)
def as_many_events_however_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told by the clock: on a busy machine its events alone would come to a limit."""
    monkeypatch.setattr(reporter, "PROGRESS_SECONDS", float("inf"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_it_pauses_and_goes_on_to_the_same_lora(shared: Path, undisturbed: Path, tmp_path: Path, moment: str) -> None:
    full_at, disk, there, missing = MOMENTS[moment]
    job = write_job(tmp_path, tiny_base("sd15", shared / "bases", depth=1), shared / "pictures")

    def limit(event: events.Event) -> int | None:
        return full_at(run_of(job), event) if event.attempt else None

    with (
        full_disk(limit) as watch,
        pytest.raises(ResumableError, match=f"Could not write to .*{disk}: the disk is full") as told,
    ):
        start(job, SETTINGS, watch)
    assert told.value.code == "disk.full"
    run = run_of(job)
    assert run.state() == "paused"
    roots = {"run": run.path, "cache": places.cache_folder()}
    found, unfound = (list(roots[path.partition("/")[0]].glob(path.partition("/")[2])) for path in (there, missing))
    assert found and not unfound
    assert not [path for folder in roots.values() for path in folder.rglob("*.tmp")]
    assert not any(isinstance(event, events.UnknownEvent) for event in events.read_events(run.events)[0])
    assert run.events.read_bytes().endswith(b"\n")

    made: list[Path] = []
    assert resume(run, Watcher(), made=made.append) == 0 and made == [run.path]
    assert same_lora(undisturbed, run.output / "test.safetensors")
