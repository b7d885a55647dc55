"""Measure the time from process start to first paint of `python -m app`.

    python -m tests.benchmarks.app_start

The goal is under 1.0 s: each start is a fresh process with an empty per-user folder. One start before the measured ones
lets Python compile what changed. CPU time is listed too, because other programs on a busy machine lengthen
only wall-clock time.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from tests.support.app_start import Start, measure

HEAVY = ("torch", "numpy")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    measure()
    starts = [measure() for _ in range(parser.parse_args().starts)]
    for start in starts:
        sys.stdout.write(line(start) + "\n")
    median = statistics.median(start.seconds for start in starts)
    fastest = min(start.seconds for start in starts)
    sys.stdout.write(f"median of {len(starts)}: {median:.2f} s, fastest {fastest:.2f} s\n")


def line(start: Start) -> str:
    """Return the text for one start."""
    loaded = [name for name in HEAVY if name in start.modules]
    return f"{start.seconds:.2f} s, CPU {start.cpu_seconds:.2f} s, heavy modules imported: {loaded or 'nothing'}"


if __name__ == "__main__":
    main()
