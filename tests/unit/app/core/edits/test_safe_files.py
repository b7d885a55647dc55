"""Files are replaced and removed only if they are what was read, whatever another program does at that moment."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.core.edits import safe_files
from app.core.edits.safe_files import ChangedMeanwhileError, FileSeen, look_at, remove_file, replace_file, sweep

pytestmark = pytest.mark.fsync

SYSTEMS = ["as it is", "without exchange", "without exchange and links"]


@pytest.fixture(params=SYSTEMS)
def file(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file, on systems that can exchange two names and on others; at the end nothing lies beside it."""
    if request.param != "as it is":
        monkeypatch.setattr(safe_files, "_renamed", lambda source, target, flag: False)
    if request.param == "without exchange and links":

        def refuse(source: str, target: str) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), source)

        monkeypatch.setattr(os, "link", refuse, raising=False)
    path = tmp_path / "é a.txt"
    path.write_bytes(b"before")
    yield path
    assert [one.name for one in tmp_path.iterdir()] in ([path.name], [])


def in_place(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def by_renaming(path: Path, data: bytes) -> None:
    other = path.parent.parent / f"{path.name} of theirs"
    other.write_bytes(data)
    other.replace(path)


def interrupt(monkeypatch: pytest.MonkeyPatch, name: str, *writes: Callable[[], object]) -> None:
    """Let another program do something right before each of the next calls of a function."""
    function, left = getattr(safe_files, name), list(writes)

    def interrupted(*values: object) -> object:
        if left:
            left.pop(0)()
        return function(*values)

    monkeypatch.setattr(safe_files, name, interrupted)


@pytest.mark.parametrize("write", [in_place, by_renaming])
@pytest.mark.parametrize("aged", [True, False])
def test_a_write_after_the_check_is_given_back_its_name(
    file: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None], aged: bool
) -> None:
    if aged:  # so long ago that its times tell a change
        os.utime(file, (1_000_000_000, 1_000_000_000))
    seen = look_at(str(file), 100)
    interrupt(monkeypatch, "_swap", lambda: write(file, b"theirs"))
    with pytest.raises(ChangedMeanwhileError):
        replace_file(str(file), seen, b"mine", durable=False)
    assert file.read_bytes() == b"theirs"


def test_the_newest_of_several_writes_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = [lambda number=number: in_place(file, b"theirs %d" % number) for number in range(4)]
    interrupt(monkeypatch, "_swap", *writes)
    with pytest.raises(ChangedMeanwhileError):
        replace_file(str(file), FileSeen(b"before"), b"mine", durable=False)
    assert file.read_bytes() == b"theirs 3"


def test_a_file_made_after_the_check_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.unlink()
    interrupt(monkeypatch, "_place", lambda: file.write_bytes(b"theirs"))
    with pytest.raises(ChangedMeanwhileError):
        replace_file(str(file), FileSeen(None), b"mine", durable=False)
    assert file.read_bytes() == b"theirs"


@pytest.mark.parametrize("write", [in_place, by_renaming])
def test_a_write_before_the_removal_stays(
    file: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    interrupt(monkeypatch, "_rename", lambda: write(file, b"theirs"))
    with pytest.raises(ChangedMeanwhileError):
        remove_file(str(file), FileSeen(b"before"))
    assert file.read_bytes() == b"theirs"


def test_a_removal_after_the_check_stays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, "_swap", file.unlink)
    with pytest.raises(ChangedMeanwhileError):
        replace_file(str(file), FileSeen(b"before"), b"mine", durable=False)
    assert not file.exists()


def test_what_is_as_it_was_seen_is_replaced_and_removed(file: Path) -> None:
    replace_file(str(file), FileSeen(b"before"), b"mine", durable=True)
    assert file.read_bytes() == b"mine"
    remove_file(str(file), FileSeen(b"mine"))
    assert not file.exists()
    replace_file(str(file), FileSeen(None), b"again", durable=False)
    assert file.read_bytes() == b"again"


def test_a_file_moved_aside_comes_back_if_the_new_one_cannot_take_its_place(
    file: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "as it is" in request.node.name:
        pytest.skip("nothing is moved aside")

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    interrupt(monkeypatch, "_place", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(str(file), FileSeen(b"before"), b"mine", durable=False)
    assert file.read_bytes() == b"before"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges two names in one step")
def test_linux_exchanges_in_one_step(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    assert safe_files._renamed(str(one), str(two), safe_files._EXCHANGE)
    assert (one.read_bytes(), two.read_bytes()) == (b"2", b"1")


def test_what_a_killed_writer_left_is_kept_before_it_is_removed(tmp_path: Path) -> None:
    stray = tmp_path / f".impasto-{'a' * 16}.tmp"
    stray.write_bytes(b"theirs")
    os.utime(stray, (1_000_000_000, 1_000_000_000))
    kept: list[tuple[str, bytes]] = []

    def refuse(name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sweep(str(tmp_path), refuse)
    assert stray.exists()
    sweep(str(tmp_path), lambda name, data: kept.append((name, data)))
    assert not stray.exists()
    assert kept == [(stray.name, b"theirs")]
