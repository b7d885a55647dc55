"""The log of a run as it is seen: at its end, going along, searched, copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QLabel
from pytestqt.qtbot import QtBot

from app.core.runs.run import Run
from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.runs.log import LogView
from tests.support.written_runs import RunWriter, held, new_run
from trainer.protocol import events

LINES = 200_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RunWriter]:
    with held(new_run(tmp_path / "a folder é", "cats")) as engine:
        yield engine


@pytest.fixture
def view(qtbot: QtBot, session: Session) -> Iterator[LogView]:
    view = LogView(session, Commands())
    qtbot.addWidget(view)
    view.resize(800, 500)
    with qtbot.waitExposed(view):
        view.show()
    yield view
    view.close()
    QApplication.processEvents()


def printed(engine: RunWriter, *lines: str) -> None:
    with engine.run.console.open("a", encoding="utf-8", newline="\n") as log:
        log.write("".join(f"{line}\n" for line in lines))


def last_line(view: LogView) -> str:
    return view.text.document().lastBlock().text()


def follow(qtbot: QtBot, run: Run, reached: Callable[[], object]) -> None:
    """Read what is new, as the page's clock does, until something is seen."""

    def seen() -> bool:
        run.read()
        return bool(reached())

    qtbot.waitUntil(seen)


@pytest.fixture
def run(qtbot: QtBot, session: Session, view: LogView, engine: RunWriter) -> Run:
    """A run with a long log that the view shows."""
    printed(engine, *(f"line {number} of the log" for number in range(LINES)))
    run = session.runs.open(engine.run.path)
    view.show_run(run)
    follow(qtbot, run, lambda: last_line(view) == f"line {LINES - 1} of the log")
    return run


def test_a_long_log_opens_at_its_end_and_goes_along(view, run, engine, qtbot):
    assert view.text.blockCount() < LINES / 20, "all of it was read"
    assert view.text.at_bottom
    assert not view.is_away()
    printed(engine, "one more")
    follow(qtbot, run, lambda: last_line(view) == "one more")
    assert view.text.at_bottom


def test_who_scrolls_up_stays_there_and_meets_what_was_printed_before(view, run, engine, qtbot):
    bar = view.text.verticalScrollBar()
    view.text.show_log(engine.run.console)
    view.text.follow(alive=True)  # a look while its end is still being read
    qtbot.waitUntil(lambda: bool(view.text._chunks))
    first = view.text.document().firstBlock().text()
    bar.setValue(0)
    qtbot.waitUntil(lambda: view.text.document().firstBlock().text() != first)
    assert view.text.firstVisibleBlock().text() == first, "what was read jumped away"
    earlier = int(view.text.document().firstBlock().text().split()[1])
    numbers = [int(line.split()[1]) for line in view.text.toPlainText().splitlines()]
    assert numbers == list(range(earlier, LINES))
    here = bar.value()
    printed(engine, "one more")
    follow(qtbot, run, lambda: last_line(view) == "one more")
    assert bar.value() == here
    assert view.is_away()
    view.to_end()
    qtbot.waitUntil(lambda: not view.is_away())


def test_a_text_far_away_is_found_and_what_is_nowhere_is_said(view, run, qtbot):
    view.ask_what()
    assert view.field.hasFocus()
    qtbot.keyClicks(view.field, "LINE 77 of")
    qtbot.keyClick(view.field, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    qtbot.waitUntil(lambda: view.text.textCursor().selectedText() == "line 77 of")
    assert view.text.textCursor().block().text() == "line 77 of the log"
    qtbot.keyClicks(view.field, "f nothing")
    qtbot.keyClick(view.field, Qt.Key.Key_Return)
    qtbot.waitUntil(lambda: view.result.text() == "No matches")
    qtbot.keyClick(view.field, Qt.Key.Key_Escape)
    assert view.text.hasFocus()


def test_a_log_that_begins_anew_is_shown_anew(view, run, engine, qtbot):
    engine.run.console.write_text("another start\n", encoding="utf-8")
    follow(qtbot, run, lambda: view.text.toPlainText() == "another start")


def test_the_last_words_of_a_dead_engine_are_shown_although_its_line_has_no_end(qtbot, session, view, tmp_path):
    with held(new_run(tmp_path, "cats")) as engine:
        printed(engine, "Loading")
        with engine.run.console.open("a", encoding="utf-8") as log:
            log.write("Killed in the mid")
        run = session.runs.open(engine.run.path)
        view.show_run(run)
        follow(qtbot, run, lambda: last_line(view))
    follow(qtbot, run, lambda: last_line(view) == "Killed in the mid")


def test_remarks_stand_above_in_words_and_as_plain_text(qtbot, session, view, engine):
    engine.tell(
        events.CachingSpeed("cache_pictures", 240, 30.0, 22.46, 8.125, 431.0),
        events.CachingSpeed("cache_texts", 50, 2.0, None, 26.0, 2512.3),
        events.CachingSpeed("cache_texts", 1, 0.0, None, 1e9, 1e9),
        events.Skipped(step=3, reason="loss"),
        events.Skipped(step=4, reason="loss"),
        events.MemoryExhausted(
            phase="train", step=12, requested=1 << 29, stage="backward", module="unet.up_blocks.1",
            allocated=None, reserved=None, forecast=None,
        ),
        events.SteppedDown(step=12, fallback=1, changes={"micro_batch": 1}, exact=True),
        events.Slow(step=40, seconds=4.0, median=1.0, reason="hot", detail="91 °C"),
        events.DataWait(step=60, share=0.053, fixed=["prefetch_batches"]),
        events.DataWait(step=60, share=0.5, fixed=[]),
        events.MemoryLeak(
            step=160, memory="gpu", since=35, rate=0.031, held=4 << 30, grown=128 << 20,
            grew={"float32 4x64x64": 60 << 20, "optimizer": 2 << 20},
        ),
        events.ErrorEvent(code="a", sentence="The base <b>x</b> is damaged.", remedy="Choose another."),
    )  # fmt: skip
    run = session.runs.open(engine.run.path)
    view.show_run(run)
    follow(qtbot, run, lambda: len(view.remarks.texts) == 11)
    assert [(one.kind, one.sentence) for one in view.remarks.texts] == [
        ("error", "The base <b>x</b> is damaged. Choose another."),
        ("warning", "GPU memory keeps growing: 3.1% per 100 steps since step 35, 128 MiB so far. "
                    "In the latest steps, this grew: tensors of float32 4x64x64 60.0 MiB, optimizer state 2.0 MiB. "
                    "Please report this leak."),
        ("warning", "Training waits for data 50.0% of the time. "
                    "Move the cache to a faster disk, or close programs that use this one."),
        ("warning", "Training waits for data 5.3% of the time. "
                    "Reset fit.prefetch_batches, so that loading adapts to this PC. "
                    "Move the cache to a faster disk, or close programs that use this one."),
        ("warning", "Training slowed down at step 40 (4.0 s per step instead of 1.0 s): "
                    "the GPU is hot and has lowered its clock (91 °C)."),
        ("warning", "Training continues from step 13 with settings that use less memory: fit.micro_batch = 1. "
                    "The result stays the same."),
        ("warning", "GPU memory ran out after step 12 (training, backward, unet.up_blocks.1). "
                    "512 MiB more was needed."),
        ("warning", "2 steps between 3 and 4 were skipped: the loss was not finite."),
        ("info", "Captions encoded: 1 in 0.0 s (1000/s)."),
        ("info", "Captions encoded: 50 in 2.0 s (25/s). "
                 "Throughput of each stage, per second: encoding 26, writing 2512."),
        ("info", "Images encoded: 240 in 30.0 s (8/s). "
                 "Throughput of each stage, per second: decoding 22.5, encoding 8.13, writing 431."),
    ]  # fmt: skip
    labels = view.remarks.findChildren(QLabel)
    assert labels
    assert all(label.textFormat() == Qt.TextFormat.PlainText for label in labels)


def test_everything_is_copied_for_a_bug_report(view, run, qtbot):
    with qtbot.waitSignal(view.message_shown):
        view.copy_all()
    text = QGuiApplication.clipboard().text()
    assert "Run cats" in text
    assert f"line {LINES - 1} of the log" in text
    assert 'name = "cats"' in text


def test_no_run_has_no_log_and_nothing_to_do(view, run):
    view.show_run(None)
    assert view.text.toPlainText() == ""
    assert view.remarks.texts == []
    assert not view.has_run()
    view.copy_all()
