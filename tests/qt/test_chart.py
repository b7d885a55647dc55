"""One chart by itself."""

import gc

from PySide6.QtCore import SIGNAL
from PySide6.QtGui import QColor

from app.qt.runs.charts.chart import Chart
from app.qt.runs.charts.lines import Drawing
from app.qt.theme import colours


def test_drawing_the_best_step_anew_leaves_nobody_behind_who_hears_of_paintings(qtbot):
    """Whoever did and was gone ended the app at the next painting."""
    chart = Chart("Loss", str)
    qtbot.addWidget(chart)
    chart.resize(400, 300)
    with qtbot.waitExposed(chart):
        chart.show()
    hearing = []
    for best in (None, 3, 5, None, 7):
        chart.draw(Drawing(best=best))
        chart.show_steps(0, 10)
        chart.plot.viewport().repaint()
        hearing.append(chart.plot.scene().receivers(SIGNAL("sigPrepareForPaint()")))
        assert chart._best_line.isVisible() == (best is not None)
    gc.collect()
    chart.plot.viewport().repaint()
    assert hearing[1:] == [hearing[1]] * 4
    assert chart._best_line.label.toPlainText() == "best: 7"
    assert chart._best_line.value() == 7
    assert chart._best_line.label.color == QColor(colours().good)
