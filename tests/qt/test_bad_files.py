"""The window opens and shows each of its pages over files that are all bad, each in another way."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from tests.support.bad_contents import BAD
from tests.support.jobs import write_job
from tests.support.runs import write_run
from tests.unit.app.core.settings.test_bad_stored import CACHES, OF_A_RUN, STORED
from trainer.protocol.queue import Queue

FILES = (*STORED, *CACHES, "presets/mine.toml", "queue/queue.json", "jobs/mine/job.toml", "runs.jsonl")


@pytest.mark.parametrize("turn", range(0, len(BAD), 5))
def test_every_page_shows(
    turn: int, per_user_folder: Path, tmp_path: Path, qtbot: QtBot, request: pytest.FixtureRequest
) -> None:
    contents = islice(cycle(BAD.values()), turn, None)
    good = write_run(per_user_folder / "jobs" / "mine" / "runs", "good", steps=20)
    queue = Queue()
    entry = queue.add(write_job(tmp_path / "job", tmp_path / "base.safetensors", tmp_path))
    paths = [per_user_folder / name for name in FILES]
    paths.append(per_user_folder / "queue" / "entries" / f"{entry.id}.json")
    for name in OF_A_RUN:
        bad = write_run(per_user_folder / "jobs" / "mine" / "runs", f"bad {name}", steps=20, state="paused")
        paths.append(bad.path / name)
    for path, data in zip(paths, contents, strict=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    window = request.getfixturevalue("window")
    for index in range(window.pages.count()):
        window._sidebar.buttons.button(index).click()
        qtbot.waitUntil(lambda index=index: window.pages.currentIndex() == index)
    runs = window.session.runs
    runs.refresh()
    qtbot.waitUntil(lambda: good.path in [each.path for each in runs.all])
    queue_keeper = window.session.queue
    queue_keeper.look()
    qtbot.waitUntil(lambda: bool(queue_keeper.now.reading.faults))
