"""The queue in the window: real entries on disk, a real worker where one is needed, nothing trained."""

import contextlib
import dataclasses
import time
from pathlib import Path

import pytest
from PySide6.QtCore import QLocale, QMimeData, Qt
from PySide6.QtWidgets import QLabel

from app.qt.actions.commands import Commands
from app.qt.runs.lists import ENTRY_WORDS, QueueList, entry_status
from app.qt.runs.queue_panel import AfterTimeDialog, QueuePanel
from trainer.protocol import locks
from trainer.protocol.queue import Entry, Queue, new_entry
from trainer.queue import machine_lanes


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Queue()


@pytest.fixture
def panel(session, qtbot):
    panel = QueuePanel(session, Commands())
    qtbot.addWidget(panel)
    panel.resize(320, 480)
    with qtbot.waitExposed(panel):
        panel.show()
    yield panel
    panel.hide()


def add(queue, *states):
    """Put entries in, each named after its state and place."""
    names = []
    for place, state in enumerate(states):
        job = Path(f"{state} {place}") / "job.toml"
        job.parent.mkdir(exist_ok=True)
        job.write_text("", encoding="utf-8")
        entry = queue.add(job)
        queue.change(entry.id, lambda one, state=state: dataclasses.replace(one, state=state, lane="cpu"))
        names.append(entry.id)
    return names


def shown(panel):
    model = panel.list.queue
    return [(model.rows[place].name, model.index(place).data(ENTRY_WORDS)) for place in range(model.rowCount())]


def order(panel):
    return [row.id for row in panel.list.queue.rows]


def choose(panel, name):
    panel.list.setCurrentIndex(panel.list.queue.index_of(name))
    panel._commands.refresh_now()


def enabled(panel):
    return {name.removeprefix("queue.") for name in panel.buttons if panel._commands[name].isEnabled()}


def test_an_empty_queue_says_what_it_is_for(panel):
    assert panel.pages.currentIndex() == 1
    assert "one at a time" in panel.pages.currentWidget().text()
    assert panel.bar.isHidden()


def test_entries_show_how_they_stand_and_offer_what_can_be_done(panel, queue, qtbot):
    names = add(queue, "waiting", "running", "paused", "interrupted", "failed", "done")
    queue.record_outcome(names[4], "failed", "The base is gone.\nLook for it.")
    with queue.engine(names[1]):
        qtbot.waitUntil(lambda: len(order(panel)) == 6)
        assert shown(panel) == [
            ("waiting 0", "Queued"), ("running 1", "Preparing"), ("paused 2", "Paused"),
            ("interrupted 3", "Interrupted"), ("failed 4", "Failed · The base is gone."), ("done 5", "Done"),
        ]  # fmt: skip
        could = {}
        for name, state in zip(names, ("waiting", "running", "paused", "interrupted", "failed", "done"), strict=True):
            choose(panel, name)
            could[state] = enabled(panel)
        assert could == {
            "waiting": {"down", "after", "pause", "duplicate", "remove"},
            "running": {"up", "down", "pause", "stop", "duplicate"},
            "paused": {"up", "down", "after", "stop", "resume", "duplicate", "remove"},
            "interrupted": {"up", "stop", "resume", "duplicate", "remove"},
            "failed": {"resume", "duplicate", "remove"},
            "done": {"duplicate", "remove"},
        }


def test_what_is_still_to_be_done_is_in_sight_below_all_that_has_ended(queue, qtbot, request):
    *_, waiting = add(queue, *["done"] * 30, "waiting")
    panel = request.getfixturevalue("panel")  # which looks at once

    def is_seen(entries):
        view = panel.list
        return len(order(panel)) == entries and view.viewport().rect().contains(
            view.visualRect(view.queue.index_of(waiting))
        )

    qtbot.waitUntil(lambda: is_seen(31))
    queue.remove(order(panel)[0])  # the list begins anew
    panel._look()
    qtbot.waitUntil(lambda: is_seen(30))
    panel.resize(320, 400)
    qtbot.waitUntil(lambda: is_seen(30))


def test_what_is_read_stays_in_its_place(qtbot):
    view = QueueList()
    qtbot.addWidget(view)
    view.resize(300, 200)
    with qtbot.waitExposed(view):
        view.show()
    rows = [Entry(f"{n:03d}", Path(f"{n}"), None, state="done" if n < 30 else "waiting") for n in range(60)]
    view.show_entries(rows)
    bar = view.verticalScrollBar()
    assert 0 < bar.value() < bar.maximum()
    for place in (bar.maximum(), 0):
        bar.setValue(place)
        view.resize(300, view.height() + 1)
        qtbot.waitUntil(lambda: view.viewport().height() == view.maximumViewportSize().height())
        assert bar.value() == min(place, bar.maximum())
        bar.setValue(40)
        view.show_entries(rows := rows[:-1])
        assert bar.value() == 40
    view.setCurrentIndex(view.queue.index(45))
    bar.setValue(0)
    view.show_entries(rows := rows[:-1])
    assert bar.value() == 0 and view.entry() == rows[45]


def test_keys_and_dragging_change_the_order_on_disk(panel, queue, qtbot):
    a, b, c = add(queue, "paused", "paused", "paused")
    qtbot.waitUntil(lambda: order(panel) == [a, b, c])
    choose(panel, a)
    panel.list.setFocus()
    qtbot.keyClick(panel.list, Qt.Key.Key_Down, Qt.KeyboardModifier.AltModifier)
    qtbot.waitUntil(lambda: order(panel) == [b, a, c])
    assert panel.list.entry().id == a  # still chosen
    panel._commands.refresh_now()
    qtbot.keyClick(panel.list, Qt.Key.Key_Down, Qt.KeyboardModifier.AltModifier)
    qtbot.waitUntil(lambda: order(panel) == [b, c, a])
    qtbot.keyClick(panel.list, Qt.Key.Key_Up)
    assert panel.list.entry().id == c

    model = panel.list.queue
    assert model.index(0).flags() & Qt.ItemFlag.ItemIsDragEnabled
    assert not model.index(0).flags() & Qt.ItemFlag.ItemIsDropEnabled  # only between entries
    dragged = model.mimeData([model.index(2)])
    assert isinstance(dragged, QMimeData)
    assert not model.dropMimeData(dragged, Qt.DropAction.MoveAction, 0, 0, model.index(-1))
    qtbot.waitUntil(lambda: order(panel) == [a, b, c])
    assert (
        model.dropMimeData(model.mimeData([model.index(0)]), Qt.DropAction.MoveAction, -1, -1, model.index(-1)) is False
    )
    qtbot.waitUntil(lambda: order(panel) == [b, c, a])
    assert [entry.id for entry in queue.entries()] == [b, c, a]


def test_buttons_hold_back_give_up_take_up_and_take_out(panel, queue, qtbot):
    busy = contextlib.ExitStack()  # so that nothing is trained
    for lane in {"cpu", *machine_lanes()}:
        busy.enter_context(locks.hold_lane(lane))
    first, second = add(queue, "paused", "interrupted")
    qtbot.waitUntil(lambda: len(order(panel)) == 2)

    def click(name, on):
        choose(panel, on)
        qtbot.mouseClick(panel.buttons[name], Qt.MouseButton.LeftButton)

    def states():
        return [row.state for row in panel.list.queue.rows]

    assert "Interrupted in the queue: 1 job" in panel.bar.words.text()
    click("queue.resume", first)
    qtbot.waitUntil(lambda: states() == ["waiting", "interrupted"] and queue.worker_alive())
    click("queue.pause", first)
    qtbot.waitUntil(lambda: states() == ["paused", "interrupted"])
    click("queue.stop", second)
    qtbot.waitUntil(lambda: states() == ["paused", "stopped"])
    click("queue.duplicate", first)
    qtbot.waitUntil(lambda: states() == ["paused", "stopped", "waiting"])
    click("queue.remove", order(panel)[2])
    qtbot.waitUntil(lambda: states() == ["paused", "stopped"])
    panel._commands.refresh_now()
    panel._commands["queue.clear"].trigger()
    qtbot.waitUntil(lambda: states() == ["paused"])
    qtbot.waitUntil(lambda: not queue.worker_alive())  # nothing is left for it
    busy.close()


def test_holding_is_shown_with_its_reason_and_ended_by_one_click(panel, queue, qtbot):
    (name,) = add(queue, "paused")
    qtbot.waitUntil(lambda: len(order(panel)) == 1)
    panel._commands.refresh_now()
    panel._commands["queue.careful"].trigger()
    qtbot.waitUntil(lambda: queue.read().hold_on_failure)
    queue.record_outcome(name, "failed", "The base is gone.")
    qtbot.waitUntil(lambda: "The base is gone." in panel.bar.words.text())
    panel._commands.refresh_now()
    assert panel._commands["queue.hold"].isChecked()
    qtbot.mouseClick(panel.bar.button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: panel.bar.isHidden())
    assert not queue.read().held


def test_a_damaged_entry_is_told_and_can_be_removed(panel, queue, qtbot):
    (name,) = add(queue, "paused")
    (queue.folder / "entries" / f"{name}.json").write_text("<b>torn", encoding="utf-8")
    qtbot.waitUntil(lambda: "Could not read the queue entry" in panel.bar.words.text())
    assert panel.bar.words.textFormat() == Qt.TextFormat.PlainText
    qtbot.mouseClick(panel.bar.button, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: panel.bar.isHidden())
    assert queue.read().faults == ()


def test_enter_goes_to_the_run_or_to_the_job(panel, session, queue, qtbot, tmp_path):
    first, second = add(queue, "paused", "paused")
    queue.change(first, lambda entry: dataclasses.replace(entry, run=tmp_path / "runs" / "style"))
    gone = []
    session.navigator.run.connect(gone.append)
    session.navigator.job.connect(gone.append)
    qtbot.waitUntil(lambda: len(order(panel)) == 2 and panel.list.queue.rows[0].run is not None)
    for name in (first, second):
        choose(panel, name)
        panel.list.setFocus()
        qtbot.keyClick(panel.list, Qt.Key.Key_Return)
    assert gone == [tmp_path / "runs" / "style", Path.cwd() / "paused 1" / "job.toml"]


def test_a_time_is_chosen_shown_and_taken_back(panel, queue, qtbot, monkeypatch):
    (name,) = add(queue, "paused")
    qtbot.waitUntil(lambda: len(order(panel)) == 1)
    dialog = AfterTimeDialog("style <b>", None, panel)
    qtbot.addWidget(dialog)
    evening = dialog.moment.dateTime()
    assert (evening.time().hour(), evening.time().minute()) == (22, 0)
    assert 0 < evening.toSecsSinceEpoch() - time.time() <= 25 * 3600
    assert all(label.textFormat() == Qt.TextFormat.PlainText for label in dialog.findChildren(QLabel))

    def answered(choice):
        def run(self):
            choice(self)
            return self.result()

        return run

    monkeypatch.setattr(AfterTimeDialog, "exec", answered(lambda dialog: dialog.buttons.accepted.emit()))
    choose(panel, name)
    panel._commands["queue.after"].trigger()
    qtbot.waitUntil(lambda: queue.get(name).after == evening.toSecsSinceEpoch())
    qtbot.waitUntil(lambda: panel.list.entry().after is not None)
    monkeypatch.setattr(AfterTimeDialog, "exec", answered(lambda dialog: dialog.at_once.click()))
    panel._commands["queue.after"].trigger()
    qtbot.waitUntil(lambda: queue.get(name).after is None)


@pytest.mark.parametrize(("hours", "words"), [(1, "from "), (24, "from tomorrow "), (24 * 9, "from "), (-1, "")])
def test_a_time_to_come_is_worded_with_its_day(hours, words):
    noon = time.mktime((2026, 11, 22, 12, 0, 0, 0, 0, -1))
    entry = dataclasses.replace(new_entry(None, Path("style"), steps=1500), after=noon + hours * 3600)
    said = entry_status(entry, noon)
    assert said.startswith(f"Queued · {words}" if words else f"Queued · to {QLocale().toString(1500)} steps")
    assert ("tomorrow" in said) == (hours == 24)


def test_nothing_is_looked_at_while_nobody_sees_it(panel, qtbot):
    assert panel._looking.isActive()
    panel.hide()
    assert not panel._looking.isActive()
