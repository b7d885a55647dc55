"""Measure the window thread's time for health checks at 100,000 images: all, one edited caption, the charts.

    python -m tests.benchmarks.app_health [--images 100000] [--write]

CPU time of this thread, so that other programs' work does not count; `--write` puts the table into its section of
tests/benchmarks/results/app.md. Captions are checked with their real token counts; image files are not read.
"""

from __future__ import annotations

import argparse
import gc
import queue
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from app.core.health import charts
from app.core.health.health import Health
from app.core.library import Folder, Library, ValueChange
from app.core.tags.index import TagIndex
from app.core.tasks import Tasks
from tests.benchmarks.app_results import write_section

NOTE = """Processor time of the window's thread; 20 tags a picture, 300 sizes, 2,000 different captions.
Written by `python -m tests.benchmarks.app_health --write`."""


class Desk:
    """A library of generated images, its health, and the longest piece of work that was posted."""

    def __init__(self, images: int) -> None:
        self._posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.library, self.tasks = Library(), Tasks(self._posted.put)
        self.index = TagIndex(self.library, self.tasks)
        self.health = Health(self.library, self.index, self.tasks, self._posted.put)
        self.longest = self.spent = 0.0
        chance, folder = random.Random(1), Folder(Path("data"), Path("data"))
        words = [f"tag {number}" for number in range(3000)]
        captions = [", ".join(chance.choices(words, k=20)) for _ in range(2000)]
        sizes = [(chance.randrange(500, 2500), chance.randrange(500, 2500)) for _ in range(300)]
        for start in range(0, images, 500):
            self.library.add(
                (folder, f"{number}.png", self._facts(chance.choice(captions), *chance.choice(sizes)))
                for number in range(start, min(start + 500, images))
            )

    @staticmethod
    def _facts(caption: str, width: int, height: int) -> dict[str, object]:
        return {"caption": caption, "width": width, "height": height}

    def settle(self) -> None:
        """Run what is posted until nothing is left."""
        while True:
            state = self.health.current_progress()
            if self.health.judge and not state.judging and not self.index.pending and self._posted.empty():
                return
            work = self._posted.get(timeout=60)
            start = time.thread_time()
            work()
            took = time.thread_time() - start
            self.spent += took
            self.longest = max(self.longest, took)


def measure(images: int) -> list[tuple[str, str]]:
    """Return the measurements as text."""
    desk = Desk(images)
    gc.freeze()
    desk.settle()
    rows = [("all images checked", f"{desk.spent:.1f} s"), ("longest piece of it", _ms(desk.longest))]
    edits, chance = [], random.Random(2)
    for number in chance.choices(list(desk.library.images), k=300):
        before = desk.library.images[number].caption
        desk.spent = 0.0
        start = time.thread_time()
        desk.library.apply([ValueChange(number, "caption", before, f"{before}, more")])
        edits.append(time.thread_time() - start)
        desk.settle()
        edits[-1] += desk.spent
    edits.sort()
    rows += [("one caption changed, median", _ms(median(edits))), ("all but the slowest hundredth", _ms(edits[296]))]
    start = time.thread_time()
    for chart in (charts.buckets, charts.caption_lengths, charts.sizes, charts.frequent_tags):
        chart(desk.health)
    rows.append(("all four charts", _ms(time.thread_time() - start)))
    desk.spent = desk.longest = 0.0
    desk.health._tags_stale = True
    start = time.thread_time()
    desk.health.refresh()
    rows.append(("rare tags asked for", _ms(time.thread_time() - start)))
    desk.health.close()
    desk.tasks.close()
    return rows


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    rows = measure(chosen.images)
    table = "\n".join(["| what | took |", "|---|---|", *(f"| {what} | {took} |" for what, took in rows)])
    print(table)  # noqa: T201
    if chosen.write:
        write_section("Health", f"{NOTE}\n\n{table}")


if __name__ == "__main__":
    main()
