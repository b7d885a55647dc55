"""How soon plans answer, on the clock: python -m tests.bench.plan_answers [--gpu 8GB]

Asks a resident planner, as the app does, for SDXL and SD 1.5 with the built-in style recipe, whose tapes ship: the
first question, which waits for the program to start; the same on another card; the same again. Then the command line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.forecasts import known_job
from trainer.config.base import Family


def main() -> None:
    """Print a line for each question: seconds to the pick, and to the whole table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="8GB")
    gpu = parser.parse_args().gpu
    families: tuple[Family, ...] = ("sdxl", "sd15")
    with tempfile.TemporaryDirectory() as folder:
        for family in families:
            job = known_job(Path(folder) / family, family)
            resident(f"{family} {gpu}", job, gpu)
            began = time.monotonic()
            command = [sys.executable, "-m", "trainer", "plan", str(job), "--gpu", gpu]
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            tell(f"{family} {gpu}, command line: {time.monotonic() - began:.2f} s")


def tell(line: str) -> None:
    """Say it at once: the next question may take a while."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def resident(name: str, job: Path, gpu: str) -> None:
    """Ask one planner four times."""
    command = [sys.executable, "-m", "trainer", "plan", "--serve"]
    began = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as server:
        questions = {
            "first": {"gpu": gpu},
            "another card": {"gpu": "16GB"},
            "again": {"gpu": gpu},
            "another length": {"gpu": gpu, "set": ["recipe.learning_rate=0.0003"]},
        }
        for number, (what, question) in enumerate(questions.items()):
            pick, whole = ask(server, {"id": number, "job": str(job), **question}, began)
            tell(f"{name}, {what}: pick {pick:.2f} s, whole {whole:.2f} s")
            began = time.monotonic()
        assert server.stdin
        server.stdin.close()


def ask(server: subprocess.Popen[str], question: dict[str, Any], began: float) -> tuple[float, float]:
    """Seconds from ``began`` to the pick and to the whole answer."""
    assert server.stdin and server.stdout
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    pick = 0.0
    for line in server.stdout:
        answer = json.loads(line)
        if answer["state"] == "pick":
            pick = time.monotonic() - began
        elif answer["state"] == "done":
            return pick, time.monotonic() - began
        assert answer["state"] != "error", answer
    raise AssertionError("the planner ended")


if __name__ == "__main__":
    main()
