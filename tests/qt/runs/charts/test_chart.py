"""One chart by itself: what is painted, and what mouse and keys ask for."""

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QColor, QWheelEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from app.core.runs.run import GpuMonitor
from app.core.runs.series import Mark
from app.qt.runs.charts.board import Board, ChartOptions
from app.qt.runs.charts.chart import Chart
from app.qt.runs.charts.painting import ChartLine, ChartSpec, Level, number
from app.qt.theme import colors
from tests.support.runs import step_event, write_events, write_run
from trainer.protocol.events import Validation

STEPS = np.arange(1.0, 101.0)


@pytest.fixture
def chart(qtbot):
    chart = Chart("Loss", number)
    qtbot.addWidget(chart)
    chart.resize(500, 300)
    with qtbot.waitExposed(chart):
        chart.show()
    chart.show_steps(0.0, 100.0)
    return chart


def line(values, look="plain", steps=STEPS, **more):
    return ChartLine("loss", steps, np.asarray(values, dtype=np.float64), look, **more)


def ink(chart, step, color):
    """Return the rows of the lines' field that have a pixel of about this color where a step stands."""
    shown, wanted, scale = chart.plot.grab().toImage(), QColor(color), chart.plot.scale
    columns = [round(scale.across(step)) + by for by in (-1, 0, 1)]
    rows = range(round(scale.field.top()) + 2, round(scale.field.bottom()) - 1)
    return [row for row in rows if any(near(shown.pixelColor(column, row), wanted) for column in columns)]


def near(one, other):
    return max(abs(a - b) for a, b in zip(one.getRgb()[:3], other.getRgb()[:3], strict=True)) < 50


def test_a_line_is_painted_where_its_values_are_and_has_gaps_where_they_are_not_known(chart):
    values = np.where((STEPS > 40) & (STEPS < 60), np.nan, 0.2 + STEPS / 100)
    chart.draw(ChartSpec([line(values)]))
    for step in (10, 30, 80):
        rows = ink(chart, step, colors().series1)
        assert abs(np.mean(rows) - chart.plot.scale.up(0.2 + step / 100)) < 2.0, step
    assert ink(chart, 50, colors().series1) == []


def test_on_a_logarithmic_axis_tenfold_is_everywhere_as_far(chart):
    chart.draw(ChartSpec([line(10.0 ** (-STEPS / 25.0))], logarithmic=True))
    ups = [np.mean(ink(chart, step, colors().series1)) for step in (25, 50, 75)]
    assert abs((ups[1] - ups[0]) - (ups[2] - ups[1])) <= 2.0
    assert ups[0] < ups[1] < ups[2]
    chart.draw(ChartSpec([line(np.where(STEPS == 50, 0.0, 1.0))], logarithmic=True))
    assert ink(chart, 50, colors().series1) == []  # nothing has no logarithm


def test_a_peak_between_a_million_points_is_seen(chart):
    steps = np.arange(1.0, 1_000_001.0)
    values = np.full_like(steps, 0.5)
    values[500_000] = 3.0
    chart.draw(ChartSpec([line(values, "thin", steps)]))
    chart.show_steps(0.0, 1e6)
    rows = [row for by in (-2, 0, 2) for row in ink(chart, 500_001 + by * 1000, colors().series1)]
    assert max(rows) - min(rows) > 0.8 * chart.plot.scale.field.height()


def test_a_step_between_two_that_are_not_known_is_a_dot(chart):
    chart.draw(ChartSpec([line(np.where(STEPS == 50, 0.5, np.nan))]))
    assert ink(chart, 50, colors().series1)


def test_best_step_levels_and_marks_are_painted(chart):
    marks = [Mark("out_of_memory", 20), Mark("saved", 30)]
    chart.draw(ChartSpec([line(STEPS)], [Level("limit", 50.0, "series3")], marks, best=60, best_label="best: {step}"))
    field = chart.plot.scale.field
    assert len(ink(chart, 20, colors().bad)) > 0.9 * field.height()
    assert 0 < len(ink(chart, 30, colors().good)) < 0.1 * field.height()
    assert len(ink(chart, 60, colors().good)) > 0.3 * field.height()  # broken, and a point between
    shown, up, base = chart.plot.grab().toImage(), round(chart.plot.scale.up(50.0)), QColor(colors().base)
    columns = (round(chart.plot.scale.across(step)) for step in np.arange(70.0, 90.0, 0.25))
    dashes = [any(not near(shown.pixelColor(column, row), base) for row in (up - 1, up, up + 1)) for column in columns]
    assert any(dashes) and not all(dashes)
    chart.draw(ChartSpec([line(STEPS)], best=None))
    assert ink(chart, 60, colors().good) == []


def test_lines_are_painted_once_for_as_many_places_of_the_cursor_as_there_are(chart, qtbot):
    chart.draw(ChartSpec([line(STEPS)]))
    chart.plot.repaint()
    painted = chart.plot._painted
    qtbot.hover(chart.plot, chart.plot.scale.field.center().toPoint())
    chart.plot.repaint()
    assert chart.plot._painted is painted
    assert chart.readout.text().startswith(f"{round(chart.cursor_step)}:  ")
    assert chart._legend_or_readout.currentWidget() is chart.readout
    qtbot.hover(chart.plot, QPoint(5, 5))  # beside the field: over the words of the axis
    assert chart.cursor_step is None and chart._legend_or_readout.currentWidget() is chart.legend


def test_dragging_moves_along_the_steps(chart, qtbot):
    chart.draw(ChartSpec([line(STEPS)]))
    chart.show_steps(20.0, 60.0)
    chart.moved.connect(chart.show_steps)
    field = chart.plot.scale.field
    start = field.center().toPoint()
    QTest.mousePress(chart.plot, Qt.MouseButton.LeftButton, pos=start)
    for by in (30, 70, 100):
        QTest.mouseMove(chart.plot, start + QPoint(by, 0))
    QTest.mouseRelease(chart.plot, Qt.MouseButton.LeftButton, pos=start + QPoint(100, 0))
    by = 100.0 / field.width() * 40.0
    assert chart.plot.steps == pytest.approx((20.0 - by, 60.0 - by))
    qtbot.hover(chart.plot, start)
    assert chart.plot.steps == pytest.approx((20.0 - by, 60.0 - by))  # let go


def test_a_wheel_enlarges_about_the_pointer_with_ctrl_only(chart, qtbot):
    chart.draw(ChartSpec([line(STEPS)]))
    chart.moved.connect(chart.show_steps)
    at = QPointF(chart.plot.scale.across(25.0), 50.0)

    def turn(notches, modifiers):
        place = QPointF(chart.plot.mapToGlobal(at.toPoint()))
        buttons, phase = Qt.MouseButton.NoButton, Qt.ScrollPhase.NoScrollPhase
        event = QWheelEvent(at, place, QPoint(), QPoint(0, 120 * notches), buttons, modifiers, phase, False)
        QApplication.sendEvent(chart.plot, event)
        return event.isAccepted()

    assert not turn(1, Qt.KeyboardModifier.NoModifier)
    assert chart.plot.steps == (0.0, 100.0)
    assert turn(1, Qt.KeyboardModifier.ControlModifier)
    first, last = chart.plot.steps
    assert last - first == pytest.approx(70.0) and chart.plot.scale.across(25.0) == pytest.approx(at.x())
    turn(-1, Qt.KeyboardModifier.ControlModifier)
    assert chart.plot.steps == pytest.approx((0.0, 100.0))
    with qtbot.waitSignal(chart.reset):
        QTest.mouseDClick(chart.plot, Qt.MouseButton.LeftButton, pos=at.toPoint())


@pytest.mark.parametrize("held_out", [True, False])
def test_the_chart_says_which_images_a_best_step_was_found_on(session, qtbot, tmp_path, held_out):
    directory = write_run(tmp_path, "run", 50, done=0)
    told = [
        Validation(step=step, loss=loss, held_out=held_out, per_timestep={}) for step, loss in ((0, 0.1), (20, 0.2))
    ]
    write_events(directory, [step_event(step, 50) for step in range(1, 31)] + told)
    run = session.runs.open(directory.path)
    run.read()
    qtbot.waitUntil(lambda: run.loaded)
    board = Board(GpuMonitor(session.tasks))
    qtbot.addWidget(board)
    board.draw([run], ChartOptions())
    qtbot.waitUntil(lambda: not board._next.isActive())
    assert (board.loss.drawing.best, board.held_out.drawing.best) == (20, 20)  # and never the untrained start
    label = "best: {step}" if held_out else "lowest on training images: {step}"
    assert (board.loss.drawing.best_label, board.held_out.drawing.best_label) == (label, label)
    assert ("Validation loss" in board.held_out.plot.accessibleName()) == held_out
    assert list(board.held_out.drawing.lines[0].values) == [0.1, 0.2]


def test_charts_are_made_when_they_are_drawn(session, qtbot, tmp_path):
    run = session.runs.open(write_run(tmp_path, "run", 50).path)
    run.read()
    qtbot.waitUntil(lambda: run.loaded)
    board = Board(GpuMonitor(session.tasks))
    qtbot.addWidget(board)
    assert board.findChildren(Chart) == []
    board.draw([run], ChartOptions())
    assert board.findChildren(Chart) == [board.loss]
    qtbot.waitUntil(lambda: not board._next.isActive())
    assert len(board._made) == 6
