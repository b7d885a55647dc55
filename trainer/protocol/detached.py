"""Starts engine processes that go on when whoever started them ends."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.protocol.atomic import long_path
from trainer.protocol.reading import UnusableFileError, open_file


def command(words: Sequence[str]) -> list[str]:
    """Return the command line of `python -m trainer WORDS` with the Python that runs this."""
    return [sys.executable, "-X", "utf8", "-m", "trainer", *words]


def launch(words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `python -m trainer WORDS` on its own; what it prints goes on at the end of `log`.

    It has no console and no parent that could take it along: closing a window or a terminal, or ending the parent,
    leaves it running. Who does not wait for it calls `let_go`. Raises OSError when it cannot be started or the log
    cannot be written.
    """
    long_path(log.parent).mkdir(parents=True, exist_ok=True)
    with long_path(log).open("ab") as out:
        return subprocess.Popen(
            command(words),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=_within_reach(log.parent),
            env={**os.environ, **(environment or {})},
            creationflags=_own_group(),
            start_new_session=sys.platform != "win32",
        )


def let_go(process: subprocess.Popen[bytes]) -> None:
    """Wait no more for a process: without this Python warns when the object goes while the process lives."""
    if process.poll() is None:
        process.returncode = 0


def speak_into(log: Path, before: Path) -> None:
    """Lead what this process prints from now on to the end of `log`, and move there what it has printed so far.

    `before` is the file that its output went into; where that is another, nothing happens. What libraries and the
    system print by themselves comes along: the last words of a process that dies are in the log. Raises OSError where
    the disk does not take all that was printed, which then stays where it was.
    """
    with long_path(before).open("r+b") as former, long_path(log).open("ab", buffering=0) as out:
        if not os.path.samestat(os.fstat(1), os.fstat(former.fileno())):
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        end = out.seek(0, os.SEEK_END)
        printed = former.read()
        if out.write(printed) < len(printed):  # a disk that fills up takes a part, and says so only at the next write
            out.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        former.truncate(0)
        for number in (1, 2):
            os.dup2(out.fileno(), number)


def last_words(log: Path, since: int = 0, lines: int = 12) -> str:
    """Return the end of what a process printed into `log`, from byte `since` on; empty where that cannot be read."""
    try:
        with open_file(log, "stream") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - 16_384))
            text = file.read().decode("utf-8", errors="replace")
    except (OSError, UnusableFileError):
        return ""
    return "\n".join(text.strip().splitlines()[-lines:])


def _within_reach(folder: Path) -> Path:
    """Return the folder, or the next above it that Windows starts a process in: there is no long form for those."""
    return next(each for each in (folder, *folder.parents) if long_path(each) == each)


def _own_group() -> int:
    if sys.platform == "win32":
        return subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
    return 0
