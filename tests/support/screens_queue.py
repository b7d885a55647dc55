"""Screens of the queue."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from PySide6.QtWidgets import QApplication, QWidget

from app.qt.runs.page import RunsPage
from app.qt.runs.queue_panel import AfterTimeDialog
from app.qt.window import Window
from tests.support.artist import shown_page
from tests.support.screens import screen, wait
from trainer.protocol.queue import Entry, Queue, State

_engines = contextlib.ExitStack()
_STATES: tuple[tuple[str, State, str], ...] = (
    ("Aquarell Hafen", "done", ""),
    ("my-cat", "running", ""),
    (
        "neon signs at night in the rain",
        "interrupted",
        "The process was killed, or the computer shut down.",
    ),
    ("Ölbilder", "paused", ""),
    ("kitchen <b>tiles", "waiting", ""),
    ("marble statues", "failed", '"/models/base.safetensors" does not exist. Check the path for typos.'),
)


def filled(window: Window) -> None:
    """Add entries in every state; this process holds the running one."""
    _engines.close()
    queue = Queue()
    for entry in queue.entries():
        queue.remove(entry.id)
    for place, (name, state, problem) in enumerate(_STATES):
        after = time.time() + 86_400 if state == "waiting" else None
        lane = "cpu" if state == "running" else None
        job = Path(name).absolute() / "job.toml"
        queue.put(Entry(f"{place:08x}", job, None, state, lane, after, added=float(place), problem=problem))
        if state == "running":
            _engines.enter_context(queue.engine(f"{place:08x}"))
    window.show_runs()
    panel = shown_page(window, RunsPage).queue
    panel._look()
    wanted = [entry.id for entry in queue.entries()]
    wait(QApplication.instance(), lambda: [entry.id for entry in window.session.queue.entries] == wanted)
    panel.list.setCurrentIndex(panel.list.queue.index(4))


@screen("queue")
def queue(window: Window) -> QWidget:
    filled(window)
    return window


@screen("queue-after")
def queue_after(window: Window) -> QWidget:
    filled(window)
    return AfterTimeDialog("Ölbilder", None, window)
