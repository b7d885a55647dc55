"""The log of a run that a terminal started: what is told of it, also before there is a folder, in plain lines."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trainer.cli.display import RunLog
from trainer.protocol import events
from trainer.protocol.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "läufe", "cats")


def test_what_is_told_before_there_is_a_folder_comes_first_and_a_resume_goes_on_below(run: RunDirectory) -> None:
    for attempt in (1, 2):
        log = RunLog()
        log.show(events.Notice(code="engine", sentence="Starting."))
        log.open(run.path)
        log.show(events.AttemptStarted(pid=1, device="cpu", attempt=attempt))
        log.show(events.ErrorEvent(code="a", sentence="The loss is gone.", remedy="Lower the rate."))
        log.close()
    once = ["Starting.", "Started on cpu.", "Error: The loss is gone.", "  What to do: Lower the rate."]
    again = [line.replace("on cpu.", "on cpu (attempt 2).") for line in once]
    assert run.console.read_text(encoding="utf-8").splitlines() == once + again


def test_a_command_that_never_gets_to_a_run_leaves_nothing(tmp_path: Path) -> None:
    log = RunLog()
    log.show(events.Notice(code="engine", sentence="Starting."))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_log_ends_no_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog()
    log.open(run.path)
    log.show(events.Notice(code="a", sentence="First."))

    def refuse(_: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(log._display, "show", refuse)
        log.show(events.Notice(code="a", sentence="Second."))
    log.show(events.Notice(code="a", sentence="Third."))
    log.close()
    assert run.console.read_text(encoding="utf-8") == "First.\n"


def test_a_log_that_cannot_be_opened_ends_no_run(run: RunDirectory) -> None:
    run.console.mkdir()
    log = RunLog()
    log.open(run.path)
    log.show(events.Notice(code="a", sentence="First."))
    log.close()
    assert list(run.console.iterdir()) == []
    assert log._early is None, "nothing is kept of a long run for a log that never comes"


def test_a_name_that_is_no_unicode_is_written_as_a_terminal_shows_it(run: RunDirectory) -> None:
    log = RunLog()
    log.show(events.Notice(code="a", sentence="bad\udcfe.png cannot be read."))  # how Linux gives the byte 0xFE
    log.open(run.path)
    log.show(events.Notice(code="a", sentence="bad\udcfe.png is left out."))
    log.close()
    assert run.console.read_text(encoding="utf-8") == "bad\\udcfe.png cannot be read.\nbad\\udcfe.png is left out.\n"


def test_a_line_that_cannot_be_written_ends_no_run(run: RunDirectory) -> None:
    log = RunLog()
    log.open(run.path)
    log.show(events.Notice(code="a", sentence="First."))
    assert log._stream is not None
    log._stream.close()  # what is written from now on raises ValueError
    log.show(events.Notice(code="a", sentence="Second."))
    log.close()
    assert run.console.read_text(encoding="utf-8") == "First.\n"
