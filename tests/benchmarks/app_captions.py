"""Measure a replacement across 100,000 captions: preview, apply, undo, and the longest stall of the window's thread.

    python -m tests.benchmarks.app_captions [--captions 100000] [--folder FOLDER]

Uses real files in ten folders, a real journal and real backups. This thread acts as the window's thread: it runs what
is posted to it, as Qt's event loop does, and each piece of work that delays the next one is a stall.
"""

from __future__ import annotations

import argparse
import gc
import os
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from app.core.edits import bulk
from app.core.edits.backups import Backups
from app.core.edits.history import Edit, History
from app.core.edits.journal import Journal
from app.core.edits.saver import Saver
from app.core.edits.writer import Writer
from app.core.library import Folder, Library
from app.core.tasks import Tasks

TAGS = "solo, standing, red hat, long hair, outdoors, blue sky, looking at viewer, smile, tree number "
FOLDERS = 10
SOME = 5_000


class Bench:
    """The session, and the event loop of the window's thread."""

    def __init__(self, base: Path, count: int) -> None:
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.longest = self.most = 0.0
        """Longest piece of work in this thread: seconds of wall-clock time, and of CPU time."""
        self.tasks = Tasks(self.posted.put)
        self.library = Library()
        self.root = base / "data"
        for place in range(FOLDERS):
            folder = Folder(self.root / f"{place} folder", self.root)
            folder.path.mkdir(parents=True)
            names = [f"picture {number:06d}" for number in range(count // FOLDERS)]
            for name in names:
                (folder.path / f"{name}.txt").write_bytes((TAGS + name[-6:]).encode())
            self.library.add((folder, name + ".jpg", {"caption": TAGS + name[-6:]}) for name in names)
        self.journal = Journal(base / "home" / "journal")
        self.saver = Saver(self.journal, Writer(Backups(base / "home" / "backups")), self.posted.put)
        self.history = History(self.library, self.journal, self.saver)

    def timed(self, work: Callable[[], None]) -> None:
        began, used = time.perf_counter(), time.thread_time()
        work()
        self.longest = max(self.longest, time.perf_counter() - began)
        self.most = max(self.most, time.thread_time() - used)

    def until(self, reached: Callable[[], bool]) -> None:
        """Run what is posted until a condition holds, checked as often as a window draws."""
        while not reached():
            try:
                work = self.posted.get(timeout=0.016)
            except queue.Empty:
                continue
            self.timed(work)

    def portion(self, name: str, start: Callable[[], None], reached: Callable[[], bool]) -> None:
        """Measure one operation: its duration, and the longest stall."""
        self.longest = self.most = 0.0
        began, used = time.perf_counter(), time.process_time()
        self.timed(start)
        self.until(reached)
        wall, used = time.perf_counter() - began, time.process_time() - used
        sys.stdout.write(f"| {name} | {wall:.2f} | {used:.2f} | {self.longest * 1000:.0f} | {self.most * 1000:.0f} |\n")
        sys.stdout.flush()

    def holds(self, text: bytes) -> bool:
        return all(text in path.read_bytes() for path in self.root.rglob("*.txt"))


def measure_disk(bench: Bench, count: int) -> None:
    """Measure how long the disk alone takes to replace as many files: a lower bound for replacing whole files."""
    files = sorted(bench.root.rglob("*.txt"))[:: max(1, count // SOME)]
    began, used = time.perf_counter(), time.process_time()
    for file in files:
        temporary = f"{file}.tmp"
        with open(temporary, "wb") as new:  # noqa: PTH123
            new.write(b"red hat")
        os.replace(temporary, file)  # noqa: PTH105
    share = count / len(files)
    wall, used = (time.perf_counter() - began) * share, (time.process_time() - used) * share
    sys.stdout.write(f"| the disk alone, replacing as many (from {len(files):,}) | {wall:.2f} | {used:.2f} | | |\n")


def measure(bench: Bench) -> None:
    """Replace, save, undo, save; check every file."""
    edits = list[Edit]()
    pictures = list(bench.library.images.values())

    def fail(fault: BaseException) -> None:
        raise fault

    def preview() -> None:
        work = lambda: bulk.replace_text(pictures, r"red (hat)", r"blue \1", pattern=True)  # noqa: E731
        bench.tasks.run(work, edits.append, fail)

    def saved() -> bool:
        return not bench.history.busy and bench.saver.now.clean

    sys.stdout.write("| what | seconds | CPU seconds | longest stall, ms | of it CPU, ms |\n|---|---|---|---|---|\n")
    bench.portion("preview", preview, lambda: bool(edits))
    bench.portion("doing in memory and journal", lambda: bench.history.do(edits[0]), lambda: not bench.history.busy)
    bench.portion("all on disk, originals backed up", lambda: None, saved)
    assert bench.holds(b"blue hat")
    bench.portion("undo in memory and journal", lambda: bench.history.undo() and None, lambda: not bench.history.busy)
    bench.portion("all on disk again", lambda: None, saved)
    assert bench.holds(b"red hat")


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where to make the files; the system's temporary folder otherwise")
    options = parser.parse_args()
    gc.set_threshold(2_000, 4, 1 << 30)  # as app.qt.main_thread sets it for the window
    with tempfile.TemporaryDirectory(dir=options.folder, ignore_cleanup_errors=True) as base:
        bench = Bench(Path(base), options.captions)
        measure(bench)
        measure_disk(bench, options.captions)
        bench.saver.close()
        bench.tasks.close()


if __name__ == "__main__":
    main()
