"""What disks would refuse is told before a run starts, in the words in which it would end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.forecasts import known_job
from trainer import cli
from trainer.config.load import load_job
from trainer.errors import RunError
from trainer.memory.planner.request import disk_errors, request_of_job, require_disk_space
from trainer.protocol import places
from trainer.protocol.run_directory import RunDirectory, require_writable

# More LoRA files than any disk holds.
ENDLESS = ("recipe.rank=512", "recipe.steps=10000000", "report.saving.every_steps=1", "recipe.learning_rate=1e-4")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return known_job(tmp_path / "Auftrag ü", "sdxl")


def told(error: RunError) -> str:
    return f"{error.sentence} {error.remedy}"


@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_file_where_runs_should_lie_is_told_alike_before_and_at_the_start(
    job: Path, tmp_path: Path, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    runs = tmp_path / "file" / below
    keys = [f"output.runs={runs}"]
    with pytest.raises(RunError) as refused:
        RunDirectory.create(runs, "test")
    assert "is a file" in refused.value.sentence
    obstacles = request_of_job(job, keys, "8GB").obstacles
    assert told(refused.value) in [told(error) for error in obstacles if isinstance(error, RunError)]
    assert cli.main(["train", str(job), "--set", *keys]) == 2
    assert refused.value.sentence in capsys.readouterr().err


def test_a_folder_that_is_still_to_be_made_stands_in_nobodys_way(job: Path, tmp_path: Path) -> None:
    keys = [f"output.runs={tmp_path / 'to' / 'be' / 'made'}"]
    assert not [error for error in request_of_job(job, keys, "8GB").obstacles if isinstance(error, RunError)]
    assert not (tmp_path / "to").exists()


@pytest.fixture
def everybodys_folder() -> Iterator[Path]:
    """A folder to which everybody may go; pytest's own let only their owner in."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no read-only folders")
def test_a_folder_that_may_not_be_written_is_told_before_anything_is(everybodys_folder: Path) -> None:
    """As nobody where tests run as root, whom permissions do not bind."""
    closed = everybodys_folder / "closed"
    closed.mkdir(mode=0o555)
    words = f"""
import os
from pathlib import Path
from trainer.protocol.run_directory import require_writable
if os.geteuid() == 0:
    os.seteuid(65534)
require_writable(Path({str(closed / "runs")!r}))
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, encoding="utf-8")
    assert f"Permission denied in {closed}" in done.stderr


@pytest.mark.skipif(sys.platform != "win32", reason="only Windows has drives")
def test_a_drive_that_is_not_there_is_named() -> None:
    missing = next(f"{letter}:\\" for letter in "QRSTUVWXYZ" if not os.path.lexists(f"{letter}:\\"))
    with pytest.raises(RunError, match="there is no drive"):
        require_writable(Path(missing) / "runs")


def test_a_disk_without_room_for_the_runs_files_is_told(job: Path) -> None:
    found = request_of_job(job, ENDLESS, "8GB")
    (error,) = [error for error in found.obstacles if isinstance(error, RunError)]
    assert "LoRA files and checkpoints" in error.sentence and "free" in error.sentence
    assert error.code == "run.room" and "another one with output.runs" in error.remedy
    frozen = load_job(job, ENDLESS)
    with pytest.raises(RunError) as refused:  # as a run is refused when it starts
        require_disk_space(frozen, found.workload, None)
    assert (refused.value.code, refused.value.remedy) == (error.code, error.remedy)
    assert "LoRA files and checkpoints" in refused.value.sentence
    assert not list(disk_errors(load_job(job, ["recipe.rank=1", "recipe.steps=10"]), found.workload, None))
    blocks = ({"match": "unet.*", "rate_factor": 0.0},)  # as much as nothing of the UNet
    few = replace(found.workload, recipe=found.workload.recipe.replaced(blocks=blocks))
    assert not list(disk_errors(frozen, few, None))


def test_what_is_encoded_counts_where_it_goes(job: Path) -> None:
    found = request_of_job(job, [], "8GB")
    assert not list(disk_errors(load_job(job), found.workload, found.counts))
    many = replace(found.counts, images=10**12)
    (error,) = disk_errors(load_job(job), found.workload, many)
    assert "encoded images and captions" in error.sentence


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second disk that is known")
def test_a_disk_without_room_for_what_is_encoded_is_told_with_what_names_it(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = request_of_job(job, [], "8GB")
    monkeypatch.setenv("IMPASTO_CACHE", "/dev/shm/impasto")
    many = replace(found.counts, images=10**12)
    (error,) = disk_errors(load_job(job), found.workload, many)
    assert (error.code, "IMPASTO_CACHE" in error.remedy) == ("cache.room", True)
    assert "/dev/shm" in error.sentence and "LoRA" not in error.sentence


def test_above_what_is_not_there_lies_what_is(tmp_path: Path) -> None:
    assert places.nearest_existing(tmp_path / "a" / "b") == tmp_path
    assert places.nearest_existing(tmp_path) == tmp_path
