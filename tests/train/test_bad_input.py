"""Bad input as its users meet it: a sentence, a remedy, exit code 2, no traceback, and nothing half-written."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bad_input import KINDS, Place, base_of_nan, kohya
from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer import cli
from trainer.errors import RunError
from trainer.protocol.run_directory import RunDirectory
from trainer.training.run.resume import resume


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    base = tiny_base("sd15", folder, form="single").rename(folder / "base.safetensors")
    photographs(folder / "pictures", count=3)
    job = write_job(folder, base, folder / "pictures", "made")
    rare = ("recipe.steps=2", "report.previews.prompts=[]", "report.validation.every=9", "recipe.layers=attention")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMPASTO_HOME", str(folder / "home"))
        patch.setenv("IMPASTO_CACHE", str(folder / "cache"))
        assert cli.main(["train", str(job), *(word for setting in rare for word in ("--set", setting))]) == 0
    return folder


@pytest.fixture
def place(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IMPASTO_CACHE", str(shared / "cache"))
    return Place(tmp_path, shared)


def tree(folder: Path) -> dict[str, str]:
    """Every file and folder below one, with what it holds."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "/"
        for path in sorted(folder.rglob("*"))
    }


def require_told(said: str) -> None:
    """Checks that an error reads as one: a sentence, a remedy, and nothing of a programmer's."""
    assert re.search(r"^Error: \S.+", said, re.MULTILINE)
    assert re.search(r"^What to do: \S.+", said, re.MULTILINE)
    assert "Traceback" not in said
    assert "went wrong" not in said


def require_whole(folder: Path, before: dict[str, str]) -> None:
    """Checks that nothing is left but, where the engine had begun already, a run that says of itself that it failed."""
    after = tree(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    runs = [path.parent for path in folder.rglob("run.json") if path.relative_to(folder).as_posix() in changed]
    for path in runs:
        run = RunDirectory.open(path)
        assert run.state() == "failed"
        inside = run.path.relative_to(folder).as_posix()
        assert not any(name.startswith(f"{inside}/{part}/") for name in changed for part in ("checkpoints", "output"))
        changed = {name for name in changed if name != inside and not name.startswith(f"{inside}/")}
        changed.discard(run.path.parent.relative_to(folder).as_posix())
    assert not changed
    assert not [name for name in after if name.endswith(".tmp")]


def test_there_are_forty_kinds_and_more() -> None:
    assert len(KINDS) >= 40


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_told_with_a_remedy(
    kind: str, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says, arrange = KINDS[kind]
    words = arrange(place)
    if "not cached" in kind:
        monkeypatch.delenv("IMPASTO_CACHE")
    before = tree(place.folder)
    capsys.readouterr()
    assert cli.main(words) == 2
    said = capsys.readouterr()
    require_told(said.err)
    assert re.search(says, said.err)
    assert "Traceback" not in said.out
    require_whole(place.folder, before)
    assert not (place.folder / "job" / "runs").exists()


def test_a_base_of_nan_is_refused_before_anything_is_trained(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    words = place.train(base=base_of_nan(place))
    before = tree(place.folder)
    assert cli.main(words) == 2
    said = capsys.readouterr()
    require_told(said.err)
    assert "returns NaN or infinity" in said.err
    assert "Step" not in said.out
    require_whole(place.folder, before)


def test_captions_in_another_encoding_are_a_finding_and_no_error(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.pictures / "chelsea.txt").write_bytes("Kätzchen, groß".encode("cp1252"))
    assert cli.main(["check", str(place.pictures), "--resolution", "64", "--show-captions"]) == 0
    told = capsys.readouterr().out
    assert "read as Windows-1252" in told
    assert "Kätzchen, groß" in told


def test_what_kohya_knows_and_we_do_not_is_a_note_and_no_error(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    subset = f"[[datasets.subsets]]\nimage_dir = '{place.pictures}'\nface_crop_aug_range = 'x'\n"
    assert cli.main(kohya(place, "[[datasets]]\nresolution = 64\n" + subset)) == 0
    assert "face_crop_aug_range" in capsys.readouterr().out


def test_a_run_that_is_running_is_not_started_twice(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    run = place.run()
    child = "import sys\nfrom pathlib import Path\nfrom trainer.protocol.run_directory import RunDirectory\n"
    child += "with RunDirectory(Path(sys.argv[1])).hold():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", child, str(run.path)], text=True, **pipes) as engine:
        assert engine.stdout.readline() == "held\n"
        record = run.run.read_bytes()
        assert cli.main(["resume", str(run.path)]) == 2
        require_told(capsys.readouterr().err)
        assert run.run.read_bytes() == record
        made: list[Path] = []
        with pytest.raises(RunError):
            resume(run, lambda _: None, made=made.append)
        assert not made  # what is printed is not led into the other engine's log
        engine.stdin.close()


def in_process(words: list[str], before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, after the Python code `before`."""
    code = f"import sys\n{before}\nfrom trainer import cli\nsys.exit(cli.main(sys.argv[1:]))\n"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, encoding="utf-8")


@pytest.mark.parametrize("words", [["train"], ["trian", "job.toml"], ["resume", "a", "--steps", "0"], ["render"]])
def test_words_that_no_command_understands(words: list[str], place: Place) -> None:
    before = tree(place.folder)
    done = subprocess.run([sys.executable, "-m", "trainer", *words], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert ": error: " in done.stderr
    assert tree(place.folder) == before


# Tests may run as root, whom permissions do not bind; then the run directory is made as nobody, who could not read the
# libraries before.
AS_NOBODY = """
import os
from trainer.protocol.run_directory import RunDirectory
as_root = RunDirectory.create
def create(parent, name):
    if os.geteuid() == 0:
        os.seteuid(65534)
    return as_root(parent, name)
RunDirectory.create = create
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no read-only folders")
def test_a_folder_that_may_not_be_written(place: Place) -> None:
    words = place.train()
    (place.folder / "job").chmod(0o555)
    for path in (place.folder, *place.folder.parents[:2], place.base):
        path.chmod(0o755)
    before = tree(place.folder)
    done = in_process(words, AS_NOBODY)
    assert done.returncode == 2, done.stderr
    require_told(done.stderr)
    assert "Could not create the run's folder" in done.stderr
    assert "Permission denied" in done.stderr
    assert tree(place.folder) == before


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_disk_that_fills_up_pauses_the_run_and_leaves_nothing_half_written(place: Place) -> None:
    words = place.train("recipe.rank=32", "report.previews.prompts=[]")
    done = in_process(words, "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))")
    assert done.returncode == 75, done.stderr
    require_told(done.stderr)
    run = RunDirectory.open(place.folder / "job" / "runs" / "test")
    assert run.state() == "paused"
    assert not any(run.checkpoints.iterdir())
    assert not any(run.output.iterdir())
