"""The matrix of samples through clicks and keys, on run directories that the engine's own classes wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import thread_time

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QColor, QMouseEvent, QWheelEvent
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.core.runs.run import Run
from app.core.runs.series import CellIndex
from app.core.session import Session
from app.qt.actions.commands import Commands
from app.qt.runs.samples.matrix import SampleMatrix
from app.qt.theme import colors
from tests.support.written_runs import PROMPTS, RunWriter, held, new_run, sample
from trainer.protocol import events

STEPS = (0, 100, 200, 300, 400, 500, 600)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RunWriter]:
    """A run that is under way and has drawn some samples."""
    with held(new_run(tmp_path / "a folder é", "cats")) as engine:
        engine.draw(*STEPS)
        for step, loss in ((200, 0.3), (400, 0.1), (600, 0.2)):
            engine.tell(events.Validation(step=step, loss=loss, held_out=True, per_timestep={}))
        yield engine


@pytest.fixture
def run(session: Session, engine: RunWriter) -> Run:
    return session.runs.open(engine.run.path)


@pytest.fixture
def matrix(qtbot: QtBot, session: Session, run: Run) -> Iterator[SampleMatrix]:
    matrix = SampleMatrix(session, Commands())
    qtbot.addWidget(matrix)
    matrix.resize(800, 600)
    matrix.show_run(run)
    with qtbot.waitExposed(matrix):
        matrix.show()
    arrive(qtbot, run)
    qtbot.waitUntil(lambda: run.job is not None and matrix.samples.prompts[0] == PROMPTS[0])
    matrix.grid.setFocus()
    yield matrix
    matrix.close()
    QApplication.processEvents()  # what was asked for "once this event is over"


def arrive(qtbot: QtBot, run: Run) -> None:
    """Read what is new, as the page's clock does."""
    heard: list[None] = []
    end = run.polled.connect(heard.append)
    run.read()
    qtbot.waitUntil(lambda: bool(heard))
    end()


def in_sight(matrix: SampleMatrix) -> set[int]:
    return {spot.step for spot in matrix.grid.seen()}


def press(qtbot: QtBot, matrix: SampleMatrix, *keys: Qt.Key) -> None:
    for key in keys:
        qtbot.keyClick(QApplication.focusWidget() or matrix.grid, key)


def painted(matrix: SampleMatrix, spot: CellIndex) -> QColor:
    """The color in a corner of a cell's picture as it is seen."""
    place = matrix.grid.rectangle(spot)
    return matrix.grid.viewport().grab().toImage().pixelColor(place.left() + 12, place.bottom() - 12)


def test_samples_of_the_moving_average_say_so(qtbot: QtBot, engine: RunWriter, run: Run, matrix: SampleMatrix) -> None:
    engine.tell(events.Preview(step=700, index=0, file="samples/step000700-1.png", seconds=1.0, ema=True))
    arrive(qtbot, run)
    assert [matrix.grid.step_title(step) for step in (0, 600, 700)] == ["Baseline", "Step 600", "Step 700 (EMA)"]
    assert matrix.grid.describe(CellIndex(700, 0)).startswith("Step 700 (EMA)")


def test_the_newest_are_in_sight_beside_the_baseline_and_painted_from_their_files(matrix, qtbot, session):
    assert {0, 600} <= in_sight(matrix)
    assert 100 not in in_sight(matrix)
    for spot in (CellIndex(0, 0), CellIndex(600, 0), CellIndex(0, 1)):
        qtbot.waitUntil(lambda spot=spot: painted(matrix, spot) == QColor(*_ground(spot)))


def _ground(spot: CellIndex) -> tuple[int, int, int]:
    shade = min(255, spot.step // 4)  # as written_runs.sample paints it
    return shade, 60 + 50 * spot.prompt % 190, 255 - shade


def test_only_what_is_seen_is_decoded(matrix, qtbot, session):
    seen = {matrix.grid.image(spot).id for spot in matrix.grid.seen()}
    made: set[int] = set()
    session.thumbnails.ready.connect(lambda thumbnail: made.add(thumbnail.image))
    qtbot.waitUntil(lambda: all(session.thumbnails.get(matrix.samples.images[one], 256) for one in seen))
    assert made <= seen
    assert len(seen) < len(matrix.samples.images)


def test_new_samples_come_in_at_the_right_unless_the_user_looks_elsewhere(matrix, qtbot, run, engine):
    engine.draw(700)
    arrive(qtbot, run)
    assert 700 in in_sight(matrix)
    matrix.grid.horizontalScrollBar().setValue(0)
    engine.draw(800)
    arrive(qtbot, run)
    assert matrix.samples.steps[-1] == 800
    assert 800 not in in_sight(matrix)
    matrix.show_newest()
    matrix.show_newest()
    assert {0, 800} <= in_sight(matrix)


def test_keys_walk_and_bring_into_sight_where_they_lead(matrix, qtbot):
    press(qtbot, matrix, Qt.Key.Key_Right)
    assert matrix.grid.current == CellIndex(600, 0)
    press(qtbot, matrix, Qt.Key.Key_Down, Qt.Key.Key_Left)
    assert matrix.grid.current == CellIndex(500, 1)
    press(qtbot, matrix, Qt.Key.Key_Home)
    assert matrix.grid.current == CellIndex(0, 1)
    press(qtbot, matrix, Qt.Key.Key_Right)
    assert 100 in in_sight(matrix)
    press(qtbot, matrix, Qt.Key.Key_End, Qt.Key.Key_PageDown, Qt.Key.Key_PageDown)
    assert matrix.grid.current == CellIndex(600, 2)
    room = matrix.grid.viewport().rect()
    assert room.contains(matrix.grid.rectangle(matrix.grid.current))
    assert "Step 600" in matrix.grid.accessibleDescription()
    assert PROMPTS[2] in matrix.grid.accessibleDescription()


def test_a_click_chooses_and_a_double_click_looks_closely(matrix, qtbot):
    place = matrix.grid.rectangle(CellIndex(600, 0)).center()
    qtbot.mouseClick(matrix.grid.viewport(), Qt.MouseButton.LeftButton, pos=place)
    assert matrix.grid.current == CellIndex(600, 0)
    qtbot.mouseDClick(matrix.grid.viewport(), Qt.MouseButton.LeftButton, pos=place)
    assert matrix.in_compare()
    press(qtbot, matrix, Qt.Key.Key_Escape)
    assert not matrix.in_compare()
    assert matrix.grid.hasFocus()


@pytest.fixture
def compared(matrix, qtbot) -> SampleMatrix:
    matrix.grid.go(CellIndex(400, 1))
    press(qtbot, matrix, Qt.Key.Key_Return)
    stage = matrix.compare.stage
    qtbot.waitUntil(lambda: stage.first.whole is not None and stage.second.whole is not None)
    return matrix


def _seen_at(matrix: SampleMatrix, part: float) -> tuple[int, int, int]:
    stage = matrix.compare.stage
    image = stage.grab().toImage()
    ratio = stage.devicePixelRatioF()
    color = image.pixelColor(round(part * stage.width() * ratio), round(0.9 * stage.height() * ratio))
    return color.red(), color.green(), color.blue()


def test_a_line_is_drawn_across_sample_and_baseline(compared, qtbot):
    baseline, sample = _ground(CellIndex(0, 1)), _ground(CellIndex(400, 1))
    assert (_seen_at(compared, 0.4), _seen_at(compared, 0.6)) == (baseline, sample)
    compared.compare.slider.setValue(350)
    assert (_seen_at(compared, 0.32), _seen_at(compared, 0.45)) == (baseline, sample)
    line = compared.compare.stage.line
    start = QPoint(line.width() // 2, line.height() // 2)
    qtbot.mousePress(line, Qt.MouseButton.LeftButton, pos=start)
    there = QPointF(start) + QPointF(0.3 * compared.compare.stage.width(), 0)
    left = Qt.MouseButton.LeftButton
    event = QMouseEvent(
        QMouseEvent.Type.MouseMove, there, line.mapToGlobal(there), left, left, Qt.KeyboardModifier.NoModifier
    )
    QApplication.sendEvent(line, event)
    assert compared.compare.slider.value() == pytest.approx(650, abs=3)
    assert (_seen_at(compared, 0.6), _seen_at(compared, 0.68)) == (baseline, sample)


def test_at_its_ends_the_line_shows_one_sample_alone(compared):
    compared.compare.slider.setValue(1000)
    assert _seen_at(compared, 0.65) == _ground(CellIndex(0, 1))
    compared.compare.slider.setValue(0)
    assert _seen_at(compared, 0.35) == _ground(CellIndex(400, 1))


def test_side_by_side_both_are_whole_and_zoomed_as_one(compared, qtbot):
    compared.set_side_by_side(True)
    stage = compared.compare.stage
    assert not stage.first.geometry().intersects(stage.second.geometry())
    assert (_seen_at(compared, 0.25), _seen_at(compared, 0.75)) == (
        _ground(CellIndex(0, 1)),
        _ground(CellIndex(400, 1)),
    )
    before = stage.first.scale
    place = stage.second.rect().center().toPointF()
    wheel = QWheelEvent(
        place, stage.second.mapToGlobal(place), QPoint(), QPoint(0, 120), Qt.MouseButton.NoButton,
        Qt.KeyboardModifier.NoModifier, Qt.ScrollPhase.NoScrollPhase, False,
    )  # fmt: skip
    QApplication.sendEvent(stage.second, wheel)
    assert stage.first.scale == stage.second.scale == pytest.approx(before * 1.25)


def test_while_comparing_keys_walk_on_and_a_pinned_sample_takes_the_place_of_the_baseline(compared, qtbot):
    press(qtbot, compared, Qt.Key.Key_Right)
    assert compared.grid.current == CellIndex(500, 1)
    assert (compared.compare.first.text(), compared.compare.second.text()) == ("Baseline", "Step 500")
    compared.pin(True)
    assert not compared.compare.first.isVisible(), "it is compared with itself"
    press(qtbot, compared, Qt.Key.Key_Down, Qt.Key.Key_Left)
    assert (compared.compare.first.text(), compared.compare.second.text()) == ("Step 500", "Step 400")
    assert compared.compare.stage.first.image == compared.grid.image(CellIndex(500, 1)).id
    compared.grid.go(CellIndex(500, 1))
    assert compared.is_pinned()
    compared.pin(False)
    assert compared.compare.first.text() == "Baseline"


def test_the_lora_of_a_cell_is_handed_on_where_it_is_still_there(matrix, qtbot, run, engine):
    file = engine.save(400)
    arrive(qtbot, run)
    matrix.grid.go(CellIndex(300, 0))
    assert not matrix.has_lora()
    matrix.grid.go(CellIndex(400, 2))
    with qtbot.waitSignal(matrix.chosen) as chosen:
        matrix.use_lora()
    assert chosen.args == [400]
    file.unlink()
    with qtbot.waitSignal(matrix.failed) as failed:
        matrix.use_lora()
    assert failed.args[0].code == "run.lora_gone"
    assert file.name in failed.args[0].sentence


def test_the_step_with_the_lowest_held_out_loss_is_marked(matrix, qtbot, run, engine):
    assert matrix.best.text() == "Lowest validation loss: step 400"
    assert "lowest validation loss" in matrix.grid.describe(CellIndex(400, 0))
    engine.tell(events.Validation(step=700, loss=0.05, held_out=True, per_timestep={}))
    arrive(qtbot, run)
    assert matrix.best.text() == "Lowest validation loss: step 700"


def test_a_damaged_picture_says_so_and_a_row_has_its_prompt_as_it_stands(matrix, qtbot, run, engine, session):
    (engine.run.samples / "broken.png").write_bytes(b"no picture")
    engine.tell(events.Preview(step=600, index=0, file="samples/broken.png", seconds=1.0))
    arrive(qtbot, run)
    spot = CellIndex(600, 0)
    qtbot.waitUntil(lambda: session.thumbnails.get(matrix.grid.image(spot), 256) is not None)
    problem = session.thumbnails.get(matrix.grid.image(spot), 256).problem
    assert problem and problem in matrix.grid.describe(spot)
    assert matrix.grid.prompt_title(2) == PROMPTS[2], "what looks like HTML is none"


def test_samples_of_a_folder_that_comes_back_are_shown(matrix, qtbot, run, engine, session):
    engine.draw(700)
    places = (engine.run.samples, engine.run.run)
    for place in places:
        place.rename(place.with_name(f"{place.name} away"))
    arrive(qtbot, run)
    spot = CellIndex(700, 0)

    def problem() -> str | None:
        shown = session.thumbnails.get(matrix.grid.image(spot), 256)
        return shown.problem if shown else "none yet"

    qtbot.waitUntil(lambda: problem() not in (None, "none yet"))
    for place in places:
        place.with_name(f"{place.name} away").rename(place)
    arrive(qtbot, run)
    qtbot.waitUntil(lambda: problem() is None)


def test_a_picture_of_another_form_stays_within_its_cell(matrix, qtbot, run, engine):
    engine.tell(sample(engine.run, 700, 0, size=(320, 320)))
    arrive(qtbot, run)
    spot = CellIndex(700, 0)
    place = matrix.grid.rectangle(spot)
    qtbot.waitUntil(lambda: _at(matrix, place.center()) == _middle(spot))
    ground = QColor(colors().base).getRgb()[:3]
    assert _at(matrix, QPoint(place.right() + 3, place.center().y())) == ground
    assert _at(matrix, QPoint(place.center().x(), place.top() + 8)) == ground, "it is less high than the cell"


def _at(matrix: SampleMatrix, place: QPoint) -> tuple[int, ...]:
    return matrix.grid.viewport().grab().toImage().pixelColor(place).getRgb()[:3]


def _middle(spot: CellIndex) -> tuple[int, int, int]:
    shade = min(255, spot.step // 4)
    return 255 - shade, 200, shade


def test_what_there_is_to_say_while_there_are_no_samples(qtbot, session, tmp_path):
    matrix = SampleMatrix(session, Commands())
    qtbot.addWidget(matrix)
    assert matrix.grid.empty == "Select a run to see its previews."
    none = session.runs.open(new_run(tmp_path, "plain", prompts=()).path)
    matrix.show_run(none)
    arrive(qtbot, none)
    assert matrix.grid.empty == "This run generates no previews: its job has no preview prompts."
    with held(new_run(tmp_path, "cats")) as engine:
        begun = session.runs.open(engine.run.path)
        matrix.show_run(begun)
        arrive(qtbot, begun)
        assert matrix.grid.empty.startswith("The first previews are generated before training starts")
    arrive(qtbot, begun)
    assert matrix.grid.empty == "This run generated no previews."
    QApplication.processEvents()


def test_two_thousand_samples_hold_the_window_up_nowhere(matrix, qtbot, run, engine):
    """The files of a few stand for all: what matters is that nobody touches what is not seen."""
    made = [events.Preview(step=1000 + 5 * step, index=index, file="samples/step-00000600-0.png", seconds=1.0)
            for step in range(400) for index in range(5)]  # fmt: skip
    engine.tell(*made)
    arrive(qtbot, run)
    assert len(matrix.samples.images) == 2000 + len(STEPS) * len(PROMPTS)
    bar = matrix.grid.horizontalScrollBar()
    longest = 0.0
    for part in range(60):
        started = thread_time()  # what this thread computes, however busy the machine is
        bar.setValue(bar.maximum() * part // 59)
        matrix.grid.viewport().repaint()
        longest = max(longest, thread_time() - started)
        QApplication.processEvents()
    assert longest < 0.25, "far above the 50 ms that it takes"


def test_a_lowest_loss_on_training_images_is_called_that(qtbot, session, tmp_path):
    with held(new_run(tmp_path / "few", "cats")) as engine:
        engine.draw(0, 100)
        for step, loss in ((100, 0.1), (200, 0.2)):
            engine.tell(events.Validation(step=step, loss=loss, held_out=False, per_timestep={}))
        matrix = SampleMatrix(session, Commands())
        qtbot.addWidget(matrix)
        run = session.runs.open(engine.run.path)
        matrix.show_run(run)
        arrive(qtbot, run)
        assert matrix.best.text() == "Lowest loss on training images: step 100"
        assert "lowest loss on training images" in matrix.grid.describe(CellIndex(100, 0))
