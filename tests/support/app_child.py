"""A process that edits captions in an endless loop and reports each edit, until it is killed."""

from __future__ import annotations

import queue
import random
import sys
from pathlib import Path

from app.core.edits.history import Edit, History
from app.core.edits.saver import Saver
from app.core.edits.writer import Writer
from app.core.library import ValueChange
from tests.support.app_captions import PICTURES, TEXTS
from tests.support.app_world import World


def main(base: Path, seed: int) -> None:
    """Edit, undo and redo; print every caption before the edit is made, and again when it was made."""
    world = World(base, PICTURES)
    posts: queue.SimpleQueue[object] = queue.SimpleQueue()
    saver = Saver(world.journal, Writer(world.backups), posts.put, pause=0.001)
    history = History(world.library, world.journal, saver)
    chance = random.Random(seed)
    while True:
        picture = world.picture(chance.randrange(len(PICTURES)))
        text = f"{chance.choice(TEXTS).strip()} {chance.random()}"
        edit = Edit("Type", (ValueChange(picture.id, "caption", picture.caption, text),))
        say(f"doing {picture.name.encode().hex()} {text.encode().hex()}")
        history.do(edit, joins=chance.random() < 0.5)
        say("done")


def say(line: str) -> None:
    """Report a line to the process that will kill this one."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
