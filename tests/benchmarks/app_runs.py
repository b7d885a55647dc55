"""Measure the Runs page in a real window: a run of 100,000 events, a training run, 1,000,000 points, 500 runs.

    python -m tests.benchmarks.app_runs FOLDER [--write]

If FOLDER is empty, runs are written into it with the engine's own classes, and kept for the next time; the training run
is the demo. Stalls are gaps between the ticks of a timer of the window's thread, one every 5 ms. A frame moves the
chart by a twentieth of the visible range and paints it, in CPU time of that thread, so that other programs' work does
not count. `--write` puts the table into its section of tests/benchmarks/results/app.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from PySide6.QtCore import QElapsedTimer, QEventLoop, QTimer
from PySide6.QtWidgets import QApplication, QWidget

from app.core.first_run import demo_images, demo_job
from app.qt.page_loader import Page
from app.qt.runs.page import RunsPage
from tests.benchmarks.app_results import write_section
from tests.support.artist import shown_page
from tests.support.runs import write_run
from trainer.files import tokens

EVENTS, POINTS, RUNS = 100_000, 1_000_000, 500
FRAMES = 40
_BEAT_MS = 5
_DEMO_STEPS = 30


@dataclass
class Stall:
    """The longest gap between two ticks of the window's thread, and the thread's own CPU time in it."""

    gap: float = 0.0
    computed: float = 0.0


class Beats:
    """Timer that ticks every few milliseconds in the window's thread."""

    def __init__(self) -> None:
        self.stall = Stall()
        self._wall = time.perf_counter()
        self._own = time.thread_time()
        self._timer = QTimer()
        self._timer.timeout.connect(self._beat)
        self._timer.start(_BEAT_MS)

    def _beat(self) -> None:
        wall, own = time.perf_counter(), time.thread_time()
        self.stall.gap = max(self.stall.gap, wall - self._wall)
        self.stall.computed = max(self.stall.computed, own - self._own)
        self._wall, self._own = wall, own

    def stop(self) -> Stall:
        """Stop, and return the longest gap."""
        self._timer.stop()
        return self.stall


def wait(until: Callable[[], bool], seconds: float = 60.0) -> float:
    """Process Qt's events until a condition holds; return the seconds that took.

    The loop rests between events, as the app's does: polling continuously would take the GIL from the workers, and a
    core.
    """
    clock, loop, asking, end = QElapsedTimer(), QEventLoop(), QTimer(), QTimer()
    clock.start()
    asking.timeout.connect(lambda: loop.quit() if until() else None)
    asking.start(_BEAT_MS)
    end.timeout.connect(lambda: loop.exit(1))
    end.start(int(seconds * 1000))
    if not until() and loop.exec():
        raise TimeoutError("the window did not get where it should be")
    return clock.elapsed() / 1000


def frames(move: Callable[[int], None]) -> list[float]:
    """Return the time of each frame in the window's thread, in seconds: move, run all that follows, paint."""
    taken = []
    for number in range(FRAMES):
        start = time.thread_time()
        move(number)
        QApplication.processEvents()
        taken.append(time.thread_time() - start)
    return taken


def measure(folder: Path) -> list[tuple[str, str]]:
    """Measure everything in one window."""
    from app.core.session import Session
    from app.core.settings.preferences import Settings
    from app.qt.application import make_application
    from app.qt.main_thread import MainThreadQueue
    from app.qt.window import Window

    _application = make_application(Settings())
    poster = MainThreadQueue()
    session = Session(poster.post)
    window = Window(session)
    window.resize(1280, 800)
    window.show()
    try:
        rows = [*_opening(window, folder / "long"), *_training(window), *_moving(window), *_listing(session)]
    finally:
        window.close()
        session.close()
        poster.close()
    return rows


def _opening(window: QWidget, path: Path) -> list[tuple[str, str]]:
    loading = Beats()
    window.show_runs()
    page = shown_page(window, RunsPage)
    wait(lambda: page.progress.board is not None and page.run is not None and page.run.loaded)
    wait(lambda: all(isinstance(window.pages.widget(place), Page) for place in range(1, window.pages.count())))
    # Loaded once per session, for 40 ms in which its library holds the GIL.
    wait(lambda: tokens._tokenizer.cache_info().currsize > 0)
    loaded = loading.stop()
    beats = Beats()
    page.open(path)
    seconds = wait(lambda: page.run is not None and page.run.directory.path == path and page.run.loaded)
    drawn = wait(lambda: page.progress.board is not None and page.progress.board.loss.isVisible())
    wait(lambda: not page.progress._redraw.isActive())
    stall = beats.stop()
    assert page.run is not None and len(page.run.series.loss) == EVENTS
    return [
        (f"a run of {EVENTS:,} steps: read", f"{seconds:.2f} s"),
        ("and drawn", f"{drawn:.2f} s later"),
        ("longest stall of the window's thread meanwhile", _told(stall)),
        (
            "longest stall from the click on Runs, before any page is loaded, until all are and CLIP's vocabulary is",
            _told(loaded),
        ),
    ]


def _training(window: QWidget) -> list[tuple[str, str]]:
    """Watch a real run of the demo, from its start to its end."""
    session, page = window.session, window.pages.currentWidget()
    shown = page.run.directory.path
    shutil.rmtree(session.jobs.folder / "neon", ignore_errors=True)  # from an earlier run of the benchmark
    demo_images()
    job = demo_job(session.jobs.folder)
    text = job.read_text(encoding="utf-8").replace("steps = 300", f"steps = {_DEMO_STEPS}")
    beats = Beats()
    name = session.queue.start(job, text)
    asking = QTimer()
    asking.timeout.connect(session.queue.look)
    asking.start(500)
    wait(lambda: (entry := session.queue.entry(name)) is not None and entry.run is not None, 120)
    asking.stop()
    page.open(session.queue.entry(name).run)
    seconds = wait(lambda: page.run.directory.path != shown and page.run.summary.state == "done", 600)
    stall = beats.stop()
    page.open(shown)
    wait(lambda: page.run.directory.path == shown and page.run.loaded)
    what = f"longest stall while a run of the demo trains ({seconds:.0f} s, {_DEMO_STEPS} steps, on the same two cores)"
    return [(what, _told(stall))]


def _moving(window: QWidget) -> list[tuple[str, str]]:
    page = window.pages.currentWidget()
    page._reading.stop()
    chance = np.random.default_rng(0)
    loss = page.run.series.loss
    loss.steps = array("d", np.arange(1.0, POINTS + 1))
    loss.values = array("d", chance.lognormal(-2.0, 0.3, POINTS))
    page.progress.draw()
    page._looking.stop()
    board = page.progress.board
    rows = []
    for part in (0.6, 0.1, 0.005):
        width = part * POINTS
        board.loss.moved.emit(0.0, width)
        taken = frames(lambda number, width=width: board.loss.moved.emit(*_window(number, width)))
        each = f"{_ms(median(taken))}, slowest {_ms(max(taken))}, {1 / median(taken):.0f} per second"
        rows.append((f"a frame with {width:,.0f} of {POINTS:,} visible points", each))
    return rows


def _window(number: int, width: float) -> tuple[float, float]:
    first = (number * 0.05 * width) % (POINTS - width)
    return first, first + width


def _listing(session: object) -> list[tuple[str, str]]:
    session.runs._summaries.__init__()  # as after a start
    listed: list[int] = []
    end = session.runs.changed.connect(lambda _: listed.append(len(session.runs.all)))
    session.runs.all = []
    session.runs.refresh()
    first = wait(lambda: bool(listed))
    end()
    start = time.perf_counter()
    session.runs._read(())
    return [
        (f"{listed[-1]} runs listed, first time", f"{first * 1000:.0f} ms"),
        ("looked at again", _ms(time.perf_counter() - start)),
    ]


def _told(stall: Stall) -> str:
    return f"{_ms(stall.gap)}, computing {_ms(stall.computed)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def fill(folder: Path) -> None:
    """Write the runs into an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "long").is_dir():
        write_run(folder, "long", EVENTS)
    for number in range(len(list(folder.glob("short-*"))), RUNS):
        write_run(folder, f"short-{number:03d}", 10)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    folder = options.folder.absolute()
    os.environ["IMPASTO_HOME"] = str(folder / "home")
    fill(folder)
    rows = measure(folder)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    when = time.strftime("%Y-%m-%d %H:%M")
    text = f"`python -m tests.benchmarks.app_runs FOLDER --write`, {when}, {os.cpu_count()} cores, load {load:.1f}.\n\n"
    text += "| what | took |\n|---|---|\n" + "\n".join(f"| {what} | {took} |" for what, took in rows)
    print(text)  # noqa: T201
    if options.write:
        write_section("Runs", text)


if __name__ == "__main__":
    main()
