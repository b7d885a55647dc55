"""What cannot be written is said by the name that the user knows, with advice that fits the reason."""

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest

from app.core.after import export
from app.core.jobs import job_file
from app.core.runs import runs
from tests.support.presets import JOB
from trainer import cli
from trainer.errors import ImpastoError
from trainer.protocol import files, places
from trainer.protocol.queue import Queue
from trainer.protocol.run_directory import RunDirectory

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
REASONS = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT, errno.ENODEV]


def fault(code: int) -> OSError:
    return OSError(code, os.strerror(code), "some file")


def run_is_made(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImpastoError:
    def refuse(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(ImpastoError) as caught:
            RunDirectory.create(tmp_path, "run")
    return caught.value


def lora_is_exported(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImpastoError:
    def refuse(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(export, "_write", refuse)
        with pytest.raises(ImpastoError) as caught:
            export.export(tmp_path / "a.safetensors", tmp_path / "loras", "a", export.LoraSummary("a"))
    return caught.value


def queue_is_written(error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImpastoError:
    def refuse(*_: object, **__: object) -> None:
        raise error

    queue = Queue(tmp_path / "queue")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(ImpastoError) as caught, queue.editing():
            pass
    return caught.value


WRITERS = {
    "run": run_is_made,
    "export": lora_is_exported,
    "queue": queue_is_written,
    "order": lambda error, path, _: runs._unwritten(RunDirectory(path), error),
    "job": lambda error, path, _: job_file._unwritable(path, error),
    "any": lambda error, _, __: places.user_error_of(error),
}


@pytest.mark.parametrize("code", REASONS, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", WRITERS)
def test_only_a_full_disk_asks_for_room(name, code, tmp_path, monkeypatch):
    error = WRITERS[name](fault(code), tmp_path, monkeypatch)
    if error is None:  # a fault that is none of the user's
        assert name == "any"
        return
    said = error.remedy.lower()
    assert ("make room" in said or "free up disk space" in said) == (code in FULL), error.remedy
    if code == errno.EROFS:
        assert "read-only" in error.remedy


def test_a_read_only_disk_is_named_before_anything_is_written(tmp_path, monkeypatch):
    if not hasattr(os, "statvfs"):
        pytest.skip("Windows tells when something is written")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(places, "_is_read_only", lambda _: True)
    error = places.unwritable(tmp_path)
    assert error is not None
    assert error.errno == errno.EROFS
    assert "read-only" in places.write_remedy(error)


@pytest.mark.parametrize("target", ["none/a.txt", "folder"])
def test_an_error_names_the_file_and_not_the_temporary_one(target, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"a\.txt|folder") as caught:
        files.write_text(tmp_path / target, "text")
    assert caught.value.filename == str(tmp_path / target)
    assert ".impasto-" not in str(caught.value)


def test_no_command_names_a_temporary_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB, encoding="utf-8")
    for words in (["presets", "share", "soft gouache", "--out", "none/a.toml"],):
        assert cli.main(words) == 2
        shown = capsys.readouterr().err
        assert ".impasto-" not in shown


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps a folder that is in use")
def test_a_job_whose_folder_was_deleted_while_it_waited_is_reported_and_not_made_again(tmp_path, capsys):
    job = tmp_path / "mine" / "job.toml"
    job.parent.mkdir()
    job.write_text(JOB, encoding="utf-8")
    entry = Queue().add(job)
    shutil.rmtree(job.parent)
    assert cli.main(["train", str(job), "--queued", entry.id]) == 2
    assert "was deleted or moved while it waited" in capsys.readouterr().err
    assert not job.parent.exists()
    found = Queue().get(entry.id)
    assert found.state == "failed"
    assert "was deleted or moved" in found.problem
