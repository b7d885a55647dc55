"""What the app takes for granted of Qt for Python, and of the tests' own nets."""

import sys

import shiboken6
from PySide6.QtCore import QAbstractListModel, QCoreApplication, QModelIndex

from app.qt.main_thread import MainThreadQueue


class Nothing(QAbstractListModel):
    """A model whose cells hold nothing, as most roles of most models do."""

    def rowCount(self, parent=QModelIndex()):  # noqa: B008, N802 - Qt's own signature
        return 1

    def data(self, index, role=0):
        return None


def test_who_posts_when_all_is_over_hurts_nobody(qapp):
    poster, done = MainThreadQueue(), []
    poster.post(lambda: done.append("late"))
    poster.close()
    QCoreApplication.processEvents()
    shiboken6.delete(poster)
    poster.post(lambda: done.append("later"))  # as a thread that waited for its child's end
    QCoreApplication.processEvents()
    assert done == []


def test_asking_a_model_costs_no_reference_of_none(qapp):
    # PySide6 6.12.0 loses one each time; Python 3.11 dies when they are used up.
    model = Nothing()
    index = model.index(0)
    before = sys.getrefcount(None)
    for _ in range(200):
        index.data()
    assert abs(sys.getrefcount(None) - before) < 20
