"""Start the app as `python -m app` in a fresh process and measure its first paint and its imports.

    python -m tests.support.app_start STARTED [PATHS]

is that fresh process: STARTED is when its parent started it, in seconds since 1970.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from tests.support import ROOT


@dataclass(frozen=True)
class Start:
    """Wall-clock and CPU time of one start until the first paint was over."""

    seconds: float
    cpu_seconds: float
    modules: frozenset[str]
    switch_seconds: float
    """Python's switch interval: how long a thread that wants the GIL waits before it asks for it."""


def measure(*paths: str) -> Start:
    """Start the app once, with an empty per-user folder and no screen; raise CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "IMPASTO_HOME": home, "QT_QPA_PLATFORM": "offscreen", "PYTHONPATH": str(ROOT)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users have cached bytecode
        command = [sys.executable, "-m", "tests.support.app_start", repr(time.time()), *paths]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True, timeout=120
        )
    measured = json.loads(done.stdout.splitlines()[-1])
    return Start(**{**measured, "modules": frozenset(measured["modules"])})


def _tell_first_paint(started: float) -> None:
    from PySide6.QtCore import QCoreApplication, QEvent, QTimer

    from app.qt.window import Window

    inherited = Window.event
    painted: list[Window] = []

    def tell() -> None:
        words = {
            "seconds": time.time() - started,
            "cpu_seconds": time.process_time(),
            "modules": sorted(sys.modules),
            "switch_seconds": sys.getswitchinterval(),
        }
        sys.stdout.write(json.dumps(words) + "\n")
        QCoreApplication.quit()

    def event(self: Window, happened: QEvent) -> bool:
        handled = inherited(self, happened)
        if happened.type() == QEvent.Type.Paint and not painted:
            painted.append(self)
            QTimer.singleShot(0, self, tell)  # once the painted window has reached the screen
        return handled

    Window.event = event


if __name__ == "__main__":
    _tell_first_paint(float(sys.argv[1]))
    sys.argv[:] = ["app", *sys.argv[2:]]
    runpy.run_module("app", run_name="__main__", alter_sys=True)
