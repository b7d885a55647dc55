"""Edits are made, taken back and made again in the order in which they were asked for, whatever takes long."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from app.core.edits import saver
from app.core.edits.backups import Backups, Written
from app.core.edits.file_actions import Rewriter, Rewriting
from app.core.edits.history import AT_ONCE, Edit, History
from app.core.edits.journal import Journal, read
from app.core.edits.save_state import DiskValue, Key, SaveRequest
from app.core.edits.saver import Saver
from app.core.edits.writer import Outcome, Writer
from app.core.library import Folder, Library, ValueChange
from app.core.tasks import Tasks


class Live:
    """A session with the real thread, and a queue for what comes home."""

    def __init__(self, base: Path, count: int) -> None:
        self.posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.library = Library()
        folder = Folder(base / "data", base / "data")
        folder.path.mkdir()
        self.data = folder.path
        self.ids = self.library.add((folder, f"{number}.jpg", {"caption": "red, x"}) for number in range(count))
        for number in range(count):
            (self.data / f"{number}.txt").write_bytes(b"red, x")
        self.journal = Journal(base / "journal")
        self.saver = Saver(self.journal, Writer(Backups(base / "backups")), self.posted.put, pause=600.0)
        self.history = History(self.library, self.journal, self.saver)

    def deliver(self) -> None:
        while not self.posted.empty():
            self.posted.get()()


def test_typing_is_one_step_and_one_write(tmp_path: Path) -> None:
    live = Live(tmp_path, 1)
    words = ["red, x", *("abcd"[:length] for length in range(1, 5))]
    for before, after in itertools.pairwise(words):
        live.history.do(Edit("Type", (ValueChange(live.ids[0], "caption", before, after),)), joins=True)
    assert (live.data / "0.txt").read_bytes() == b"red, x"
    live.saver.flush()
    live.deliver()
    assert (live.data / "0.txt").read_bytes() == b"abcd"
    assert live.saver.now.saved == 1
    live.history.undo()
    assert live.library.images[live.ids[0]].caption == "red, x"
    assert live.history.undo_name is None and live.history.redo_name == "Type"
    live.saver.close()
    assert list((tmp_path / "journal").iterdir()) == []
    assert (live.data / "0.txt").read_bytes() == b"red, x"


def test_who_waits_for_the_disk_waits_for_nothing_that_is_typed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(tmp_path, 2)
    writing, typed, write = threading.Event(), threading.Event(), live.saver._writer.write

    def wait_and_write(requests: Sequence[SaveRequest]) -> Iterable[Outcome]:
        writing.set()
        assert typed.wait(120.0)
        return write(requests)

    monkeypatch.setattr(live.saver._writer, "write", wait_and_write)
    live.history.do(Edit("Type", (ValueChange(live.ids[0], "caption", "red, x", "first"),)), joins=True)
    waits = threading.Thread(target=live.saver.flush)
    waits.start()
    assert writing.wait(120.0)
    live.history.do(Edit("Type", (ValueChange(live.ids[1], "caption", "red, x", "more"),)), joins=True)
    typed.set()
    waits.join(120.0)  # what was typed is due in six hundred
    assert not waits.is_alive()
    assert [(live.data / f"{number}.txt").read_bytes() for number in range(2)] == [b"first", b"red, x"]
    live.saver.close()
    assert (live.data / "1.txt").read_bytes() == b"more"


def test_who_waits_for_the_disk_waits_for_a_caption_that_is_typed_on_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(tmp_path, 2)
    writing, hurried, typed = threading.Event(), threading.Event(), threading.Event()
    write, hurry = live.saver._writer.write, live.saver.hurry

    def wait_and_write(requests: Sequence[SaveRequest]) -> Iterable[Outcome]:
        writing.set()
        assert typed.wait(120.0)
        return write(requests)

    def hurry_and_tell() -> None:
        hurry()
        hurried.set()

    monkeypatch.setattr(live.saver._writer, "write", wait_and_write)
    monkeypatch.setattr(live.saver, "hurry", hurry_and_tell)
    live.history.do(Edit("Set", (ValueChange(live.ids[1], "caption", "red, x", "blue"),)))
    assert writing.wait(120.0)
    live.history.do(Edit("Type", (ValueChange(live.ids[0], "caption", "red, x", "first"),)), joins=True)
    waits = threading.Thread(target=live.saver.flush)
    waits.start()
    assert hurried.wait(120.0)
    live.history.do(Edit("Type", (ValueChange(live.ids[0], "caption", "first", "first, more"),)), joins=True)
    typed.set()
    waits.join(120.0)
    assert not waits.is_alive()
    assert [(live.data / f"{number}.txt").read_bytes() for number in range(2)] == [b"first, more", b"blue"]
    live.saver.close()


def test_what_no_thread_has_entered_when_the_disk_hangs_at_the_end_is_there_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(tmp_path, 2)
    writing, over, write = threading.Event(), threading.Event(), live.saver._writer.write

    def hang(requests: Sequence[SaveRequest]) -> Iterable[Outcome]:
        writing.set()
        assert over.wait(60.0)
        return write(requests)

    monkeypatch.setattr(saver, "_PATIENCE", 0.0)
    monkeypatch.setattr(live.saver._writer, "write", hang)
    live.history.do(Edit("Set", (ValueChange(live.ids[0], "caption", "red, x", "one"),)))
    assert writing.wait(60.0)
    live.history.do(Edit("Set", (ValueChange(live.ids[1], "caption", "red, x", "two"),)))
    live.saver.close()
    over.set()
    live.saver._thread.join(60.0)  # type: ignore[union-attr]
    (left,) = (tmp_path / "journal").glob("*.jsonl")
    assert {key.name: request.desired for key, request in read(left)[0].items()} == {"0.jpg": "one", "1.jpg": "two"}


def test_a_large_edit_is_made_in_portions_and_undone_whole(tmp_path: Path) -> None:
    live = Live(tmp_path, AT_ONCE + 10)
    told = list[Edit]()
    live.history.done.connect(told.append)
    live.history.do(Edit("All", tuple(ValueChange(number, "caption", "red, x", "blue") for number in live.ids)))
    asked = list[bool]()
    live.history.settle(lambda: asked.append(live.history.busy))
    assert live.history.busy and not told and not asked
    live.deliver()
    assert asked == [False] and [len(edit.changes) for edit in told] == [AT_ONCE + 10]
    live.saver.flush()
    assert {path.read_bytes() for path in live.data.iterdir()} == {b"blue"}
    live.history.undo()
    live.history.finish()
    live.saver.close()
    assert {path.read_bytes() for path in live.data.iterdir()} == {b"red, x"}


def test_what_stands_on_disk_is_taken_over_behind_a_large_edit_that_is_being_made(tmp_path: Path) -> None:
    live = Live(tmp_path, AT_ONCE + 10)
    live.history.do(Edit("All", tuple(ValueChange(number, "caption", "red, x", "blue") for number in live.ids)))
    live.saver.learned.emit(DiskValue(Key(str(live.data), f"{AT_ONCE}.jpg", "caption"), 0, "red"))
    live.deliver()
    assert {picture.caption for picture in live.library.images.values()} == {"blue"}
    live.saver.close()


def rewriter_of(live: Live, tasks: Tasks) -> Rewriter:
    return Rewriter(live.library, live.history, live.saver, Backups(live.data.parent / "backups"), tasks)


def writing_again(live: Live, tasks: Tasks) -> Rewriting:
    files = [Written(live.data / "1.txt", b"red, x", b"again")]
    return Rewriting(rewriter_of(live, tasks), "Write again", live.data, files)


@pytest.fixture
def rewritten(tmp_path: Path) -> Iterator[tuple[Live, Tasks]]:
    """A caption edited, then its file and another written whole, as the painting of masks does it."""
    live = Live(tmp_path, 2)
    tasks = Tasks(live.posted.put)
    rewriter = rewriter_of(live, tasks)
    live.history.do(Edit("Set", (ValueChange(live.ids[0], "caption", "red, x", "one"),)))
    live.saver.flush()
    for number, before in enumerate((b"one", b"red, x")):
        file = live.data / f"{number}.txt"
        file.write_bytes(b"whole")
        live.library.set_facts({live.ids[number]: {"caption": "whole"}}, "caption")
        rewriter.record(f"Write {number}", live.data, [Written(file, before, b"whole")])
    yield live, tasks
    tasks.close()
    live.saver.close()


def settle(live: Live, tasks: Tasks) -> list[str]:
    """Let all that is under way come to its end; return what the files hold then."""
    while live.history._running_action:
        live.posted.get(timeout=60)()
    live.saver.flush()
    live.deliver()
    return [(live.data / f"{number}.txt").read_text(encoding="utf-8") for number in range(2)]


def test_an_undo_waits_its_turn_while_files_of_another_are_written(rewritten: tuple[Live, Tasks]) -> None:
    live, tasks = rewritten
    told = [step.name for step in (live.history.undo(), live.history.undo(), live.history.undo()) if step]
    assert told == ["Write 1", "Write 0", "Set"]
    assert (live.history.undo_name, live.history.redo_name) == (None, "Set")
    assert settle(live, tasks) == ["red, x", "red, x"]
    assert (live.history.depths, live.library.images[live.ids[0]].caption) == ((0, 3), "red, x")
    for _ in range(4):
        live.history.redo()
    assert settle(live, tasks) == ["whole", "whole"]
    assert live.history.depths == (3, 0)


def test_what_waits_to_be_undone_and_is_redone_stays_as_it_is(rewritten: tuple[Live, Tasks]) -> None:
    live, tasks = rewritten
    for _ in range(3):
        live.history.undo()
    assert [step.name for step in (live.history.redo(), live.history.redo()) if step] == ["Set", "Write 0"]
    assert (live.history.undo_name, live.history.redo_name) == ("Write 0", "Write 1")
    assert settle(live, tasks) == ["whole", "red, x"]
    live.history.redo()
    live.history.undo()
    assert live.history.undo_name == "Write 0"
    assert settle(live, tasks) == ["whole", "red, x"]


def test_files_that_are_to_be_written_while_others_are_undone_wait_for_them(rewritten: tuple[Live, Tasks]) -> None:
    live, tasks = rewritten
    live.history.undo()
    live.history.perform(writing_again(live, tasks))
    assert live.history.writing and live.history.writing.name == "Write 1"
    assert settle(live, tasks) == ["whole", "again"]
    assert live.history.undo_name == "Write again" and live.history.writing is None
    live.history.undo()
    assert settle(live, tasks) == ["whole", "red, x"]


def test_what_is_asked_for_first_is_taken_back_last_though_it_waits(rewritten: tuple[Live, Tasks]) -> None:
    live, tasks = rewritten
    live.history.undo()
    live.history.perform(writing_again(live, tasks))
    live.history.do(Edit("Rate", (ValueChange(live.ids[0], "rating", None, 3),)))
    assert [step.name for step in (live.history.undo(), live.history.undo()) if step] == ["Rate", "Write again"]
    assert (live.history.undo_name, live.history.redo_name) == ("Write 0", "Write again")
    assert settle(live, tasks) == ["whole", "red, x"] and live.library.images[live.ids[0]].rating is None
    assert [step.name for step in (live.history.redo(), live.history.redo()) if step] == ["Write again", "Rate"]
    assert settle(live, tasks) == ["whole", "again"] and live.library.images[live.ids[0]].rating == 3


def test_what_is_done_while_an_undo_waits_stays(rewritten: tuple[Live, Tasks]) -> None:
    live, tasks = rewritten
    live.history.undo()
    live.history.undo()
    live.history.do(Edit("Rate", (ValueChange(live.ids[0], "rating", None, 3),)))
    assert settle(live, tasks) == ["one", "red, x"]
    assert (live.library.images[live.ids[0]].rating, live.history.undo_name) == (3, "Rate")
