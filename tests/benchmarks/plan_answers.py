"""Measure how soon plans are computed.

    python -m tests.benchmarks.plan_answers [--gpu 8GB ...] [--new]

Asks a resident planner, as the app does, for SDXL and SD 1.5 with the built-in style recipe, whose traces ship: one
request to a planner that has to start for it; then further ones to another planner: another GPU, the same again,
another length, rank and optimizer. Then the command line. Every planner has only the shipped traces, and Python's
compiled modules, as in an installation that has been used before. Reports wall-clock time, and CPU time, which is more
reliable on a busy machine. ``--new`` instead requests settings that have to be traced for SDXL because nothing ships
for them, some seconds after the first result, as people do who read it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.forecasts import known_job
from trainer.config.base import Family

PLAN = (sys.executable, "-m", "trainer", "plan")
# Of the second, whose libraries take more memory, only traces ship: out-of-memory results have to be simulated.
CARDS = ("8GB", "RTX 5060")
# Nothing ships for these jobs: they are traced, by libraries that no other request loads.
OTHER_OPTIMIZER = 'recipe.optimizer={name="adamw8bit"}'
NEW = (
    "recipe.rank=64", 'recipe.layers="attention"', 'recipe.layers="all"', "recipe.text_encoder.learning_rate=5e-5",
    "recipe.token_chunks=225", "recipe.dropout=0.1", "recipe.resolution=768", OTHER_OPTIMIZER,
)  # fmt: skip
READING = 8.0
"""Seconds that a user reads a result before the next request."""


def main() -> None:
    """Print a line for each request: seconds to the first pick, to the last one if it differs, to the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", default=CARDS)
    parser.add_argument("--new", action="store_true", help="settings that have to be traced")
    options = parser.parse_args()
    cards = options.gpu
    families: tuple[Family, ...] = ("sdxl", "sd15")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "compiled")
        jobs = {family: known_job(Path(folder) / family, family) for family in families}
        with fresh_home():
            resident(
                jobs["sd15"], [{"gpu": cards[0]}, {"gpu": cards[0], "set": [OTHER_OPTIMIZER]}]
            )  # compiles Python's modules
        for family, job in jobs.items():
            for gpu in cards:
                if not options.new:
                    questions(f"{family} {gpu}", job, gpu)
                elif family == "sdxl":
                    new_settings(f"{family} {gpu}", job, gpu)


def questions(name: str, job: Path, gpu: str) -> None:
    """Measure all requests for one job on one GPU."""
    with fresh_home():
        first, used = resident(job, [{"gpu": gpu}])
        tell(f"{name}, first request, including startup: {first[0]}; {used:.2f} s of CPU time")
    others: list[dict[str, Any]] = [
        {"gpu": gpu}, {"gpu": "16GB"}, {"gpu": gpu}, {"gpu": gpu, "set": ["recipe.learning_rate=0.0003"]},
        {"gpu": gpu, "set": ["recipe.rank=24"]}, {"gpu": gpu, "set": [OTHER_OPTIMIZER]},
    ]  # fmt: skip
    with fresh_home():
        answers, _ = resident(job, others)
        named = ("another GPU", "again", "another length", "another rank", "another optimizer")
        for what, answer in zip(named, answers[1:], strict=True):
            tell(f"{name}, {what}: {answer}")
    for _ in range(3):
        with fresh_home():
            began, before = time.monotonic(), spent()
            subprocess.run([*PLAN, str(job), "--gpu", gpu], stdout=subprocess.DEVNULL, check=True)
            tell(f"{name}, command line: {time.monotonic() - began:.2f} s; {spent() - before:.2f} s of CPU time")


def new_settings(name: str, job: Path, gpu: str) -> None:
    """Measure each new setting with a separate planner, which knows the job without it."""
    for setting in NEW:
        with fresh_home():
            answers, used = resident(job, [{"gpu": gpu}, {"gpu": gpu, "set": [setting]}], READING)
            tell(f"{name}, {setting}: {answers[1]}; {used:.1f} s of CPU time")


def tell(line: str) -> None:
    """Print a line at once: the next request may take a while."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def spent() -> float:
    """Return the CPU seconds of ended children; 0 on Windows, which does not report them."""
    times = os.times()
    return times.children_user + times.children_system


@contextmanager
def fresh_home() -> Iterator[None]:
    """Use an empty per-user folder."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["IMPASTO_HOME"] = home
        yield


def resident(job: Path, asked: Sequence[dict[str, Any]], reading: float = 0.0) -> tuple[list[str], float]:
    """Send requests to one planner, one after the other; return a line for each, and the CPU seconds of all.

    Waits ``reading`` seconds after each result.
    """
    answers = []
    before, began = spent(), time.monotonic()
    with subprocess.Popen(
        [*PLAN, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as server:
        for number, question in enumerate(asked):
            picks, whole = ask(server, {"id": number, "job": str(job), **question}, began)
            shown = ", then ".join(f"{pick:.2f}" for pick in picks)
            answers.append(f"pick {shown} s, whole {whole:.2f} s")
            time.sleep(reading)
            began = time.monotonic()
        assert server.stdin
        server.stdin.close()
    return answers, spent() - before


def ask(server: subprocess.Popen[str], question: dict[str, Any], began: float) -> tuple[list[float], float]:
    """Return the seconds from ``began`` to each pick and to the complete result."""
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    picks: list[float] = []
    for line in server.stdout:
        answer = json.loads(line)
        if answer["state"] == "pick":
            picks.append(time.monotonic() - began)
        elif answer["state"] == "done":
            return picks, time.monotonic() - began
        assert answer["state"] != "error", answer
    raise AssertionError("the planner ended")


if __name__ == "__main__":
    main()
