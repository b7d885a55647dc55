"""Run random edits, undo, conflict choices, kills, quits, writes by other programs and failing disks.

After each, the disk holds the newest acknowledged value or there is a visible conflict, and no file has disappeared.
Other programs also write at every moment in which the app is about to touch the disk, even between check and rename.

    python -m tests.faults.captions [--sequences 100000] [--shards 1] [--kills 50] [--seed 0]

Sequences are hypothesis' state machine of tests/support/app_captions.py, some 20 steps each, in separate processes
(shards), with crashes at a random opening, renaming or removal of a file. Each of the kills is a real process, killed
by the operating system while it edits: every caption that was reported safe must be found again, complete.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from app.core.edits.writer import normalized
from tests.support.app_captions import PICTURES, ROOM, Captions
from tests.support.app_world import World

PORTION = 250


def play(sequences: int, first: int) -> None:
    """Run so many sequences and report after every batch; stop at the first that fails."""
    began = time.monotonic()
    for start in range(0, sequences, PORTION):
        machine = seed(first + start)(type("Captions", (Captions,), {}))
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=min(PORTION, sequences - start),
                stateful_step_count=20,
                deadline=None,
                database=None,
                phases=[Phase.generate],  # shrinking runs hundreds more; the seed repeats what failed
                suppress_health_check=list(HealthCheck),
            ),
        )
        done = min(start + PORTION, sequences)
        took = f"{time.monotonic() - began:.0f} s, {time.process_time():.0f} s of CPU time"
        sys.stdout.write(f"{done} sequences, {took}; continue with --seed {first + done}\n")
        sys.stdout.flush()


def kill(number: int) -> int:
    """Kill one process after a random number of edits; return how many captions it had reported safe."""
    chance = random.Random(number)
    base = Path(tempfile.mkdtemp(dir=ROOM, prefix="killed "))
    command = [sys.executable, "-m", "tests.support.app_child", str(base), str(number)]
    safe: dict[str, str] = {}
    doing: tuple[str, str] | None = None
    made, most = 0, chance.randint(1, 60)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as child:
        assert child.stdout
        for line in child.stdout:
            if doing and line.startswith("done"):
                safe[doing[0]], doing = doing[1], None
                made += 1
                if made >= most:
                    child.kill()
            elif line.startswith("doing") and line.endswith("\n"):
                name, text = (bytes.fromhex(part).decode() for part in line.split()[1:])
                doing = name, text
    check(base, safe, doing)
    shutil.rmtree(base)
    return made


def check(base: Path, safe: dict[str, str], doing: tuple[str, str] | None) -> None:
    """Start again and find everything that was safe; the edit in progress may be there or not."""
    world = World(base, PICTURES)
    state = world.saver.now
    assert not state.conflicts, state.conflicts
    assert not state.problems, state.problems
    disk = world.disk()
    for picture in world.library.images.values():
        found = disk.value(picture, "caption")
        if picture.name in safe:
            wanted = {normalized(safe[picture.name])} | (
                {normalized(doing[1])} if doing and doing[0] == picture.name else set()
            )
            assert normalized(str(found)) in wanted, f"{picture.name}: {safe[picture.name]!r} is lost, found {found!r}"
    world.saver.close()


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.shards > 1:
        share = -(-options.sequences // options.shards)
        command = [sys.executable, "-m", "tests.faults.captions", "--kills", "0", "--sequences", str(share)]
        children = [
            subprocess.Popen([*command, "--seed", str(options.seed + shard * share)]) for shard in range(options.shards)
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            sys.exit("A sequence failed; see above.")
    else:
        play(options.sequences, options.seed)
    safe = [kill(options.seed + number) for number in range(options.kills)]
    sys.stdout.write(f"{len(safe)} processes killed, {sum(safe)} edits that they had made safe found again\n")


if __name__ == "__main__":
    main()
