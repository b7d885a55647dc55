import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.protocol import commands, files, locks, places, processes
from trainer.protocol.events import EventWriter, Notice, read_events
from trainer.protocol.reading import read_text
from trainer.protocol.run_directory import RunDirectory, known_runs

pytestmark = pytest.mark.fsync

# What a child needs to become somebody whom permissions bind: tests may run as root.
AS_NOBODY = "import os\nif os.geteuid() == 0: os.seteuid(65534)\n"


def in_child(code: str, cwd: Path) -> str:
    """Run code in a process of its own; return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_written_file_holds_the_data_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "Größe 大.json"
    files.write_json(target, {"name": "大", "lines": ["a\nb"], "b": 1, "a": 2})
    assert json.loads(target.read_text(encoding="utf-8")) == {"name": "大", "lines": ["a\nb"], "b": 1, "a": 2}
    assert "大" in target.read_text(encoding="utf-8")
    files.write_text(target, "one\ntwo\n")
    assert target.read_bytes() == b"one\ntwo\n"
    assert read_text(target, "text") == "one\ntwo\n"
    assert names(tmp_path) == [target.name]


def test_the_data_is_on_the_disk_before_the_name_points_to_it(tmp_path, monkeypatch):
    calls: list[str] = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("sync"), real_sync(file)))
    monkeypatch.setattr(os, "replace", lambda source, target: (calls.append("rename"), real_replace(source, target)))
    files.write_bytes(tmp_path / "a", b"x")
    assert calls == (["sync", "rename"] if sys.platform == "win32" else ["sync", "rename", "sync"])
    calls.clear()
    files.write_bytes(tmp_path / "a", b"y", durable=False)
    assert calls == ["rename"]


def test_json_refuses_numbers_it_has_no_word_for_and_keeps_the_old_file(tmp_path):
    target = tmp_path / "a.json"
    files.write_json(target, 1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(target, float("nan"))
    assert read_text(target, "text") == "1\n"


def test_a_failing_writer_leaves_the_old_file_and_no_temporary_one(tmp_path):
    target = tmp_path / "lora.safetensors"
    target.write_bytes(b"old")

    def write_and_fail() -> None:
        with files.staged(target) as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == [target.name]


def test_a_file_held_open_by_a_scanner_is_waited_for(tmp_path, monkeypatch):
    refusals = [PermissionError(errno.EACCES, "held by a scanner")] * 2
    real = os.replace

    def replace(source, target):
        if refusals:
            raise refusals.pop()
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    files.write_bytes(tmp_path / "a", b"new")
    assert refusals == []
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_file_held_for_good_is_an_error_after_about_two_seconds(tmp_path, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(files.time, "sleep", waited.append)

    def refuse(source, target):
        raise PermissionError(errno.EACCES, "held")

    monkeypatch.setattr(os, "replace", refuse)
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(PermissionError):
        files.write_bytes(tmp_path / "a", b"new")
    assert 1.5 < sum(waited) < 2.5
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no read-only folders")
def test_a_read_only_folder_keeps_its_file(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    tmp_path.chmod(0o555)
    code = (
        "from pathlib import Path\nfrom trainer.protocol import files\n" + AS_NOBODY + "try:\n"
        "    files.write_bytes(Path('a'), b'new')\n"
        "except PermissionError:\n"
        "    print('refused')\n"
    )
    assert in_child(code, tmp_path) == "refused"
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_keeps_the_old_file_and_is_known_as_such(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    code = (
        "import resource\nfrom pathlib import Path\nfrom trainer.protocol import files, places\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    files.write_bytes(Path('a'), bytes(100_000))\n"
        "except OSError as error:\n"
        "    print(places.is_disk_full(error))\n"
    )
    assert in_child(code, tmp_path) == "True"
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_which_errors_mean_a_full_disk():
    assert places.is_disk_full(OSError(errno.ENOSPC, "No space left on device"))
    assert not places.is_disk_full(PermissionError(errno.EACCES, "Permission denied"))
    windows = OSError("There is not enough space on the disk")
    windows.winerror = 112
    assert places.is_disk_full(windows)


def test_a_writer_killed_in_mid_write_leaves_a_stray_that_the_next_start_sweeps(tmp_path):
    code = (
        "import os\nfrom pathlib import Path\nfrom trainer.protocol import files\n"
        "with files.staged(Path('a')) as temporary:\n"
        "    temporary.write_bytes(b'half')\n"
        "    os._exit(0)\n"
    )
    in_child(code, tmp_path)
    (stray,) = names(tmp_path)
    for other in (".impasto-notes.tmp", "a.tmp"):
        (tmp_path / other).write_bytes(b"the user's")
    files.remove_temporary_files(tmp_path)
    assert stray not in names(tmp_path)
    assert names(tmp_path) == [".impasto-notes.tmp", "a.tmp"]
    files.remove_temporary_files(tmp_path / "missing")


def test_free_space_is_told_for_folders_that_are_not_there_yet(tmp_path):
    free = places.free_bytes(tmp_path / "not" / "yet")
    assert abs(free - places.free_bytes(tmp_path)) < 1 << 30
    assert free > 0


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("C:\\Bilder\\a.txt", "\\\\?\\C:\\Bilder\\a.txt"),
        ("C:/Bilder/../a.txt", "\\\\?\\C:\\a.txt"),
        ("\\\\nas\\share\\a.txt", "\\\\?\\UNC\\nas\\share\\a.txt"),
        ("\\\\?\\C:\\a.txt", "\\\\?\\C:\\a.txt"),
    ],
)
def test_long_windows_paths_take_the_form_without_limit(path, expected):
    assert files.extended(path) == expected


def test_short_paths_stay_as_they_are(tmp_path):
    assert files.long_path(tmp_path) == tmp_path


def test_paths_beyond_260_letters_are_written(tmp_path):
    folder = tmp_path.joinpath(*["ü" * 60] * 5)
    files.long_path(folder).mkdir(parents=True)
    files.write_text(folder / "a.txt", "x")
    assert read_text(folder / "a.txt", "text") == "x"
    with locks.hold_lock(folder / "lock", 0):
        assert locks.is_held(folder / "lock")
    with EventWriter(folder / "events.jsonl", 1) as writer:
        writer.write(Notice(code="a", sentence="b"))
    assert len(read_events(folder / "events.jsonl")[0]) == 1


def test_a_run_beyond_260_letters_lives_as_any_other(tmp_path):
    parent = tmp_path.joinpath(*["ü" * 60] * 5)
    run = RunDirectory.create(parent, "run")
    assert known_runs() == [run.path]
    with run.hold():
        assert run.begin_attempt({}) == 1 and run.is_alive()
        commands.send(run.commands, "save")
        (waiting,) = commands.pending(run.commands)
        commands.finish(waiting, "done")
        assert commands.pending(run.commands) == []
    assert RunDirectory.open(run.path).state() == "interrupted"
    process = processes.launch(["--version"], run.console)
    assert process.wait(60) == 0
    assert processes.last_words(run.console)
