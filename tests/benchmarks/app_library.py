"""Open large datasets in the real window, without a screen, and measure how long the user waits.

    python -m tests.benchmarks.app_library jpegs FOLDER      10,000 photographs: first thumbnails, all loaded
    python -m tests.benchmarks.app_library many FOLDER       100,000 images: longest stall, memory

An empty folder is filled first, and kept for the next time. Stalls are gaps between the ticks of a timer in the
window's thread; CPU times are listed next to them because other programs slow the machine.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

from PySide6.QtCore import QEventLoop, Qt, QTimer

from app.core.library import LibraryImage
from app.core.query import tokens
from app.qt.page_loader import PagePlaceholder
from tests.benchmarks.app_results import write_section

_TITLES = {"jpegs": "photographs", "many": "very many images"}
_BEAT_MS = 2
_ASK_MS = 10


class Heart:
    """Timer in the window's thread that records its longest pauses, with the CPU time spent in them.

    Long work of the thread itself shows as CPU time of the thread; waiting for a worker that holds the GIL shows as CPU
    time of the process; a pause in which not even the process ran is the machine's.
    """

    def __init__(self) -> None:
        self._timer = QTimer()
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.setInterval(_BEAT_MS)
        self._timer.timeout.connect(self._beat)
        self.start()

    def start(self) -> None:
        """Discard the measurements."""
        self.pauses: list[tuple[float, float, float]] = []
        self._last = _clocks()
        self._timer.start()

    def stop(self) -> None:
        """Stop the timer."""
        self._timer.stop()

    def _beat(self) -> None:
        now = _clocks()
        self.pauses.append((now[0] - self._last[0], now[1] - self._last[1], now[2] - self._last[2]))
        self._last = now

    def words(self) -> str:
        """Return the longest pauses in wall-clock time, and in CPU time of process and thread, in milliseconds."""
        wall, process, thread = max(self.pauses)
        fair = max(min(pause[:2]) for pause in self.pauses)
        own = max(pause[2] for pause in self.pauses)
        return (
            f"most work of the window's own between two beats {1000 * own:.0f} ms; longest pause that the process used "
            f"{1000 * fair:.0f} ms; by the wall's clock {1000 * wall:.0f} ms, in which the machine gave the process "
            f"{1000 * process:.0f} ms and the window's thread {1000 * thread:.0f} ms"
        )


def _clocks() -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), time.thread_time()


def make_jpegs(folder: Path, count: int) -> None:
    """Cut photographs of scikit-image into pieces of many sizes, all different."""
    import skimage.data
    from PIL import Image

    sources = [Image.fromarray(getattr(skimage.data, name)()) for name in ("astronaut", "chelsea", "coffee", "rocket")]
    chance = random.Random(1)
    for number in range(count):
        source = sources[number % len(sources)]
        width, height = (chance.randint(side // 2, side) for side in source.size)
        left, top = chance.randint(0, source.width - width), chance.randint(0, source.height - height)
        piece = source.crop((left, top, left + width, top + height))
        scale = chance.choice((1.0, 1.5, 2.0))
        piece = piece.resize((round(width * scale), round(height * scale)), Image.Resampling.BILINEAR)
        piece.convert("RGB").save(folder / f"photo {number}.jpg", quality=chance.choice((80, 88, 93)))
        if number % 7:
            (folder / f"photo {number}.txt").write_text(f"photo, number {number}, soft light", encoding="utf-8")


def make_many(folder: Path, count: int) -> None:
    """Link a few small images under very many names; every tenth has a caption."""
    from PIL import Image

    kept = folder / "some"
    kept.mkdir()
    colors = ("teal", "maroon", "olive", "navy", "gold", "coral", "plum", "tan")
    for place, color in enumerate(colors):
        Image.new("RGB", (320, 200 + 40 * place), color).save(kept / f"{place}.jpg")
    for number in range(count - len(colors)):
        where = folder / f"{number // 20_000 + 1}_part"
        where.mkdir(exist_ok=True)
        os.link(kept / f"{number % len(colors)}.jpg", where / f"img {number}.jpg")
        if number % 10 == 0:
            (where / f"img {number}.txt").write_text(f"tag {number % 50}, other", encoding="utf-8")


class Bench:
    """The real window, with functions that wait for it."""

    def __init__(self) -> None:
        from app.core.session import Session
        from app.core.settings.preferences import Settings
        from app.qt.application import make_application
        from app.qt.main_thread import MainThreadQueue
        from app.qt.window import Window

        self.application = make_application(Settings())
        self.poster = MainThreadQueue()
        self.session = Session(self.poster.post)
        self.window = Window(self.session)
        self.window.resize(1400, 900)
        self.window.show()
        self.heart = Heart()
        self.until(self._settled, 60.0)

    def _settled(self) -> bool:
        """Return whether everything that the window loads late is there (a second on a quiet machine)."""
        pages = self.window.pages
        made = not any(isinstance(pages.widget(number), PagePlaceholder) for number in range(pages.count()))
        return made and tokens._clip.cache_info().currsize > 0

    def until(self, reached: Callable[[], bool], seconds: float) -> float:
        """Run the event loop until a condition holds; return the seconds it took."""
        begin = time.perf_counter()
        loop, asking = QEventLoop(), QTimer()

        def ask() -> None:
            if reached() or time.perf_counter() - begin > seconds:
                loop.quit()

        asking.timeout.connect(ask)  # a loop that rests between events, as the app's own does: polling continuously
        asking.start(min(_ASK_MS, round(1000 * seconds)))  # would take a core, and the GIL, from the workers
        if not reached():
            loop.exec()
        return time.perf_counter() - begin

    def thumbnails_in_sight(self) -> int:
        """Return how many visible images have their thumbnails."""
        grid, pictures = self.window.images.views.grid, self.session.library.images
        return sum(
            any(self.session.thumbnails.get(pictures[number], edge) for edge in (256, 512))
            for number in grid.in_sight()
        )

    def known(self) -> int:
        """Return how many images have a known size."""
        return sum(one.width is not None or one.problem is not None for one in self.session.library.images.values())

    def close(self) -> None:
        """Close window and session."""
        self.heart.stop()
        self.window.close()
        self.session.close()


def jpegs(folder: Path, count: int) -> list[str]:
    """Measure opening a folder of photographs."""
    bench = Bench()
    spent = time.process_time()
    bench.heart.start()
    bench.window.open([folder])
    first = bench.until(lambda: bench.thumbnails_in_sight() > 0, 60.0)
    screen = first + bench.until(
        lambda: bench.thumbnails_in_sight() >= len(bench.window.images.views.grid.in_sight()), 60.0
    )
    early = time.process_time() - spent
    known = screen
    while bench.known() < count and known < 600:
        known += bench.until(lambda: False, 0.1)
    spent = time.process_time() - spent
    lines = [
        f"{count:,} JPEGs: first thumbnail after {first:.2f} s, all in sight after {screen:.2f} s "
        f"({early:.2f} s of CPU time), all images loaded after {known:.1f} s ({spent:.1f} s of CPU time).",
        f"While opening: {bench.heart.words()}.",
        f"Memory {_memory():.0f} MB.",
    ]
    bench.close()
    return lines


def many(folder: Path, count: int) -> list[str]:
    """Measure stalls and memory with very many images."""
    bench = Bench()
    grid, view = bench.window.images.views.grid, bench.session.view
    lines = []

    def part(name: str, work: Callable[[], None]) -> None:
        gc.collect()
        bench.until(lambda: False, 0.3)
        bench.heart.start()
        work()
        bench.until(lambda: False, 0.3)
        lines.append(f"{name}: {bench.heart.words()}.")

    part("Opening", lambda: _open(bench, folder, count))
    part("Scrolling by the wheel's step, thumbnails coming", lambda: _scroll(bench, 300))
    part("Jumping about", lambda: _jump(bench, 60))
    part("Selecting all and one, by turns", lambda: _select(bench))
    part("Filtering, 20 queries", lambda: _filter(bench))
    part("Sizing thumbnails", lambda: _sizes(bench))
    lines.append(
        f"{len(view.ids):,} shown, {bench.known():,} known, {len(grid.in_sight())} in sight. Memory {_memory():.0f} MB."
    )
    lines.append(_follow(folder, [bench.session.library.images[number] for number in grid.in_sight()]))
    bench.close()
    return lines


def _follow(folder: Path, in_sight: Sequence[LibraryImage]) -> str:
    """Measure what a minute of checking for changes costs while there are none."""
    from app.core.disk.scanner import FolderScanner

    near: dict[Path, set[str]] = {}
    for picture in in_sight:
        names = (picture.name, f"{picture.path.stem}.txt", f"{picture.path.stem}.caption")
        near.setdefault(picture.folder.path, set()).update(names)
    looker = FolderScanner(folder.absolute(), lambda news: None)
    for _ in range(2):
        looker.scan(False, near, {}, {})
    spent = time.thread_time()
    for _ in range(30):
        looker.scan(False, near, {}, {})
    return f"Following the disk while nothing changes: {time.thread_time() - spent:.2f} s of CPU time per minute."


def _open(bench: Bench, folder: Path, count: int) -> None:
    bench.window.open([folder])
    bench.until(lambda: len(bench.session.view.ids) >= count, 300.0)


def _scroll(bench: Bench, steps: int) -> None:
    bar = bench.window.images.views.grid.verticalScrollBar()
    for _ in range(steps):
        bar.setValue(bar.value() + bar.singleStep())
        bench.until(lambda: False, 0.01)


def _jump(bench: Bench, jumps: int) -> None:
    bar, chance = bench.window.images.views.grid.verticalScrollBar(), random.Random(2)
    for _ in range(jumps):
        bar.setValue(chance.randint(0, bar.maximum()))
        bench.until(lambda: False, 0.1)


def _select(bench: Bench) -> None:
    view = bench.session.view
    for _ in range(3):
        bench.window.images.views.select_all()
        bench.until(lambda: False, 0.1)
        view.select([view.ids[9]], view.ids[9])
        bench.until(lambda: False, 0.1)


def _filter(bench: Bench) -> None:
    for number in range(20):
        bench.session.filtering.apply(("tag:other", "", f'tag:"tag {number}"', "missing:caption")[number % 4])
        bench.until(lambda: False, 0.05)
    bench.session.filtering.apply("")


def _sizes(bench: Bench) -> None:
    for side in (*range(100, 400, 20), 168):
        bench.window.images.views.slider.setValue(side)
        bench.until(lambda: False, 0.05)


def _memory() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / (1 << 10)


def main() -> None:
    """Run one measurement and write it into the results."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("what", choices=["jpegs", "many"])
    words.add_argument("folder", type=Path)
    words.add_argument("--count", type=int)
    chosen = words.parse_args()
    count = chosen.count or {"jpegs": 10_000, "many": 100_000}[chosen.what]
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if not any(chosen.folder.iterdir()):
        (make_jpegs if chosen.what == "jpegs" else make_many)(chosen.folder, count)
    with tempfile.TemporaryDirectory() as home:
        os.environ["IMPASTO_HOME"] = home
        lines = (jpegs if chosen.what == "jpegs" else many)(chosen.folder, count)
    _enter(chosen.what, count, lines)


def _enter(what: str, count: int, lines: list[str]) -> None:
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    text = f"{now}, {os.cpu_count()} cores{load}, `python -m tests.benchmarks.app_library {what}`.\n\n"
    text += "".join(f"- {line}\n" for line in lines)
    write_section(f"Library, {_TITLES[what]}", text)
    sys.stdout.write(f"{count:,} {_TITLES[what]}\n{text}")


if __name__ == "__main__":
    main()
