"""Kill the app or its engine at random moments of a user's whole workflow, and look for what was lost.

    python -m tests.faults.desktop --kills 20 [--seed 1] [--work FOLDER]

Every workflow goes from a folder of images to a LoRA in ComfyUI's folder, through a real window and real processes. In
each, one process is killed (SIGKILL, on Windows TerminateProcess) at a random moment within the time that the
undisturbed workflow took; then a new user session continues from what is shown. In the end the job must contain what
was requested, exactly one run must be in the list, and everything it wrote must equal the undisturbed run's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults.kill_resume import left_by
from tests.support import tool_homes

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
VICTIMS = ("app", "engine")
_LONGEST = 900.0

# One session: continues from whatever is there, and prints the file that it exported.
SITTING = """
import sys
from pathlib import Path
from PySide6.QtWidgets import QApplication
from tests.support.artist import Sitting, neon
application = QApplication([])
sitting = Sitting()
sitting.session.reopen()
file = sitting.artist.go_whole_way(neon(Path(sys.argv[1])))
sitting.end()
print(file)
"""


@dataclass(frozen=True)
class Way:
    """One workflow from its beginning to its end."""

    folder: Path
    seconds: float
    file: Path
    kills: int

    def found(self) -> dict[str, object]:
        """Return what the workflow left behind, as far as it must be the same for all."""
        home = self.folder / "home"
        (job,) = (home / "jobs").glob("*/job.toml")
        runs = {json.loads(line)["path"] for line in (home / "runs.jsonl").read_text("utf-8").splitlines()}
        written = {} if len(runs) > 1 else left_by(Path(*runs))
        text = job.read_text("utf-8").replace(str(self.folder), "")
        return {"job": text, "runs": len(runs), "name sent": self.file.name, **written}


def go(folder: Path, victim: str | None = None, moment: float = 0.0) -> Way:
    """Run the whole workflow in a new folder; kill `victim`, if given, after so many seconds."""
    folder.mkdir(parents=True)
    (folder / "home").mkdir()
    tool_homes.comfy_portable(folder / "tools", folder / "elsewhere")
    begun, kills = time.monotonic(), 0
    while True:
        sitting = _sit(folder)
        if victim and not kills:
            kills += _kill(sitting, folder, victim, begun + moment)
        try:
            said, errors = sitting.communicate(timeout=_LONGEST)
        except subprocess.TimeoutExpired:
            sitting.kill()
            raise
        if sitting.returncode == 0:
            return Way(folder, time.monotonic() - begun, Path(said.strip().splitlines()[-1]), kills)
        if victim != "app":
            raise RuntimeError(f"{folder}: the app ended with {sitting.returncode}:\n{errors}")
        victim = None  # it was killed: start a new session


def _sit(folder: Path) -> subprocess.Popen[str]:
    home = {"IMPASTO_HOME": str(folder / "home"), "IMPASTO_LOOK_IN": str(folder / "tools")}
    return subprocess.Popen(
        [sys.executable, "-X", "utf8", "-c", SITTING, str(folder)],
        env={**os.environ, **home, "QT_QPA_PLATFORM": "offscreen", "IMPASTO_CACHE": str(folder.parent / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def _kill(sitting: subprocess.Popen[str], folder: Path, victim: str, moment: float) -> int:
    """Kill one process at its moment, or once it is running; return 0 if the workflow ended before."""
    while sitting.poll() is None:
        if time.monotonic() >= moment:
            pid = sitting.pid if victim == "app" else _engine(folder)
            if pid is not None:
                _end(pid)
                return 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            sitting.wait(0.05)
    return 0


def _engine(folder: Path) -> int | None:
    """Return the running engine, from its entry in the queue."""
    for entry in (folder / "home" / "queue" / "entries").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):  # being replaced
            told = json.loads(entry.read_text("utf-8"))
            if told["state"] == "running" and told["pid"]:
                return int(told["pid"])
    return None


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, KILL)


def say(line: str) -> None:
    """Print progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Compare every disturbed workflow with an undisturbed one."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--kills", type=int, default=20)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--work", type=Path, help="a folder for homes and runs (default: a temporary one)")
    chosen = words.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = chosen.work or Path(temporary)
        plain = go(work / "undisturbed")
        wanted, chance, wrong = plain.found(), random.Random(chosen.seed), 0
        say(f"undisturbed: {plain.seconds:.0f} s")
        for number in range(chosen.kills):
            victim, moment = VICTIMS[number % len(VICTIMS)], chance.uniform(1.0, plain.seconds)
            way = go(work / f"{number:02d}", victim, moment)
            found = way.found()
            lost = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            wrong += bool(lost)
            when = f"{victim} killed at {moment:.1f} s" if way.kills else f"{victim} had ended before {moment:.1f} s"
            say(f"{number}: {when}, {way.seconds:.0f} s: {'LOST ' + ', '.join(lost) if lost else 'nothing lost'}")
    say(f"{chosen.kills} ways, {wrong} with something lost")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
