"""Keeps Python's collector of garbage from stopping the window.

A full collection looks at every object there is: 170 ms at 100,000 pictures, in the middle of whatever the user does.
What the app drops is freed at once by reference counts; only cycles wait, few of them, and the young ones are still
found often. The rest is looked through when the user turns to another program.
"""

from __future__ import annotations

import gc

from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication

_YOUNG = 2_000
"""New objects after which the young are looked through, in less than a millisecond."""
_MIDDLE = 4
_NEVER = 1 << 30


def avoid_pauses(application: QGuiApplication) -> None:
    """Collect in full only while no window of the app is the active one."""
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
    application.applicationStateChanged.connect(_changed)


def _changed(state: Qt.ApplicationState) -> None:
    if state != Qt.ApplicationState.ApplicationActive:
        gc.collect()
