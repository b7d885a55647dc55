"""The Runs page: the list, the charts, several runs over each other, and an engine that is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from PySide6.QtCore import QEvent, QItemSelectionModel, QObject, QRect, Qt, QTimer
from pytestqt.qtbot import QtBot

from app.core.runs.summary import RunSummary
from app.qt.presets.page import PresetsPage
from app.qt.runs import lists
from app.qt.runs.charts.chart import Chart
from app.qt.runs.lists import COLOR, RUN_WORDS
from app.qt.runs.page import RunsPage
from app.qt.runs.rows import state_color
from app.qt.train.page import TrainPage
from app.qt.widgets import FlowLayout
from app.qt.window import Window
from tests.support.artist import shown_page
from tests.support.jobs import photographs, write_job
from tests.support.runs import step_event, write_checkpoint, write_events, write_run
from tests.support.tiny import tiny_base
from trainer.protocol.run_directory import RunDirectory, Status

SEEN_WITHIN = 2_000


@pytest.fixture
def page(window: Window) -> RunsPage:
    window.show_runs()
    return shown_page(window, RunsPage)


def listed(page: RunsPage) -> list[tuple[str, str]]:
    return [(run.name, run.state) for run in page.list.runs.rows]


def drawn(page: RunsPage, qtbot: QtBot) -> None:
    """Wait until the chosen runs are read and drawn."""
    qtbot.waitUntil(lambda: bool(page.progress.runs) and all(run.loaded for run in page.progress.runs))
    qtbot.waitUntil(lambda: page.progress.board is not None and page.progress.board.loss.isVisible())
    qtbot.waitUntil(lambda: not page.progress._redraw.isActive())
    qtbot.waitUntil(lambda: not page.progress.board._next.isActive())


def test_no_runs_are_told_in_words(page, qtbot):
    qtbot.waitUntil(lambda: page.lists.currentWidget() is page.empty)
    assert "no runs yet" in page.empty.text()


def test_a_queue_that_is_held_is_not_said_to_begin_anything(page, session, qtbot, tmp_path):
    job = tmp_path / "cats" / "job.toml"
    job.parent.mkdir()
    job.write_text("", encoding="utf-8")
    queue = session.queue.queue
    queue.hold("The base is gone.")
    queue.add(job)
    session.queue.look()
    qtbot.waitUntil(lambda: "queue below is on hold" in page.empty.text())
    queue.release()
    session.queue.look()
    qtbot.waitUntil(lambda: "starts appear here" in page.empty.text())


def test_of_many_runs_only_those_that_go_on_or_changed_are_worded_anew(qapp, monkeypatch):
    worded: list[str] = []
    monkeypatch.setattr(
        lists,
        "run_status",
        lambda run, left, starting: worded.append(run.name) or f"{run.state} {left}{' on' * starting}",
    )
    days = [1]
    monkeypatch.setattr(lists, "_today", lambda: (2026, days[0]))
    runs = [RunSummary(Path(f"run {number}"), f"run {number}", "done") for number in range(3)]
    runs.append(RunSummary(Path("live"), "live", "running"))
    beginning: list[str] = []
    model = lists.RunModel(lambda path: float(len(worded)), lambda run: run.name in beginning)
    assert model.show(runs) and len(worded) == 4
    worded.clear()
    runs[1] = replace(runs[1], state="paused")
    assert not model.show(runs) and worded == ["run 1", "live"]
    assert list(model.words) == ["done 0.0", "paused 0.0", "done 2.0", "running 1.0"]
    for begun, words in ((["run 1"], "paused 0.0 on"), ([], "paused 0.0")):
        beginning[:] = begun
        worded.clear()
        assert not model.show(runs) and worded == ["run 1", "live"]
        assert model.words[1] == words
    worded.clear()
    days.append(days.pop() + 1)
    model.show(runs)
    assert len(worded) == 4


def test_list_and_header_say_the_same_of_a_run_whose_engine_is_on_its_way(page, session, qtbot, tmp_path):
    """What the worker enters when it has begun a resume; the engine gets as far as the run some seconds later."""
    directory = write_run(tmp_path, "cats", 200, done=50, state="paused")
    qtbot.waitUntil(lambda: listed(page) == [("cats", "paused")])
    qtbot.waitUntil(lambda: page.run is not None and page.run.loaded)
    queue = session.queue.queue
    entry = queue.add_run(directory.path)
    with queue.engine(entry.id):
        queue.change(entry.id, lambda entry: replace(entry, state="running", pid=None))
        session.queue.look()
        qtbot.waitUntil(lambda: page.header.state.text() == "Starting…")
        row = page.list.runs.index(0)
        assert row.data(RUN_WORDS) == "Starting… · 50 of 200"
        assert row.data(COLOR) == state_color("running")
    queue.remove(entry.id)
    session.queue.look()
    qtbot.waitUntil(lambda: page.header.state.text() == "Paused")
    assert row.data(RUN_WORDS).startswith("Paused · 50 of 200")
    assert row.data(COLOR) == state_color("paused")


@pytest.mark.parametrize("state", ["waiting", "failed"])
def test_a_started_entry_that_is_removed_leaves_the_header(page, session, qtbot, tmp_path, state):
    write_run(tmp_path, "cats", 200)
    qtbot.waitUntil(lambda: listed(page) == [("cats", "done")])
    queue = session.queue.queue
    queue.hold("Keep the entry waiting.")
    page.begin("7-unknown")  # an entry that the queue has not listed yet keeps the page waiting
    job = tmp_path / "dogs" / "job.toml"
    job.parent.mkdir()
    job.write_text("", encoding="utf-8")
    entry = queue.add(job)
    session.queue.look()
    qtbot.waitUntil(lambda: session.queue.entry(entry.id) is not None)
    assert page._awaited == "7-unknown"
    page.begin(entry.id)
    assert page.header.name.text() == entry.name
    queue.change(entry.id, lambda entry: replace(entry, state=state))
    session.queue.look()
    qtbot.waitUntil(lambda: session.queue.entry(entry.id).state == state)
    queue.remove(entry.id)
    session.queue.look()
    shown = "cats" if state == "waiting" else "No run"
    qtbot.waitUntil(lambda: page.header.name.text() == shown)


def test_what_was_read_before_the_page_was_made_is_shown_at_once(window, session, qtbot):
    session.runs.refresh()
    qtbot.waitUntil(lambda: session.runs.looked)
    window.show_runs()
    page = shown_page(window, RunsPage)
    assert page.lists.currentWidget() is page.empty


def test_a_run_from_the_command_line_appears_and_is_drawn(page, qtbot, tmp_path):
    write_run(tmp_path, "from the shell", 200)
    qtbot.waitUntil(lambda: listed(page) == [("from the shell", "done")])
    drawn(page, qtbot)
    board = page.progress.board
    raw, smooth = board.loss.drawing.lines
    assert list(raw.steps) == list(range(1, 201))
    assert list(raw.values) == list(page.run.series.loss.values)
    assert min(raw.values) < min(smooth.values) < max(smooth.values) < max(raw.values)
    assert board.loss.plot.accessibleDescription().startswith("smoothed: ")
    assert len(board._made) == 6 and all(chart.isVisible() for chart in board._made)
    assert not board.gpu_chart.isVisible()  # nobody asks a card about a run that has ended


def test_the_window_fits_a_full_hd_screen_at_200_percent(page, window, qtbot, tmp_path):
    for show, kind in (
        (window.show_train, TrainPage),
        (window.show_presets, PresetsPage),
        (window.show_runs, RunsPage),
    ):
        show()
        shown_page(window, kind)
    directory = write_run(tmp_path, "a run with quite a long name", 200, done=50, state="running")
    with directory.hold():
        drawn(page, qtbot)
        qtbot.waitUntil(lambda: page.header.buttons["runs.pause"].isVisible())
        made = [window.pages.widget(place) for place in range(window.pages.count())]
        assert {type(one).__name__ for one in made if one.minimumSizeHint().width() > 870} == set()
        assert window.minimumSizeHint().width() <= 960 and window.minimumSizeHint().height() <= 500
    tools = page.progress.findChild(FlowLayout)
    one = tools.heightForWidth(2000)
    assert tools.heightForWidth(420) > one > 0
    tools.setGeometry(QRect(0, 0, 420, tools.heightForWidth(420)))
    places = [tools.itemAt(place).geometry() for place in range(tools.count())]
    assert max(place.right() for place in places) < 420
    assert not any(a.intersects(b) for a, b in combinations(places, 2))


def test_steps_that_come_are_drawn(page, qtbot, tmp_path):
    directory = write_run(tmp_path, "going on", 200, done=50, state="running")
    with directory.hold():
        qtbot.waitUntil(lambda: listed(page) == [("going on", "running")])
        drawn(page, qtbot)
        write_events(directory, [step_event(step, 200) for step in range(51, 61)])
        chart = page.progress.board.loss
        qtbot.waitUntil(lambda: chart.drawing.lines[0].steps[-1] == 60)
        qtbot.waitUntil(lambda: page.list.runs.index(0).data(RUN_WORDS).endswith(" left"))
    qtbot.waitUntil(lambda: listed(page) == [("going on", "interrupted")])


def test_a_run_that_is_being_read_is_not_said_to_have_no_step(page, session, qtbot, tmp_path):
    write_run(tmp_path, "begun", 5, state="running", done=0)
    run = session.runs.open(tmp_path / "begun")
    page.progress.show_runs([run])
    assert page.progress.waiting.text() == "Reading…"
    run.read()
    qtbot.waitUntil(lambda: page.progress.waiting.text().startswith("No step is finished yet."))
    assert run.loaded and not run.series.loss


def test_several_runs_are_laid_over_each_other_with_what_differs(page, qtbot, tmp_path):
    write_run(tmp_path, "one", 120, rank=8)
    two = write_run(tmp_path, "two", 80, rank=32, seed=2)
    qtbot.waitUntil(lambda: len(listed(page)) == 2)
    page.list.choose(two.path)  # the page may have looked, and chosen, when there was the other one only
    page.list.selectAll()
    drawn(page, qtbot)
    lines = page.progress.board.loss.drawing.lines
    assert [(line.run, line.look, len(line.steps)) for line in lines] == [("two", "smooth", 80), ("one", "smooth", 120)]
    assert len({line.color for line in lines}) == 2
    table = page.progress.difference.table
    qtbot.waitUntil(table.isVisible)
    texts = [[table.item(row, place).text() for place in range(3)] for row in range(table.rowCount())]
    assert sorted(texts) == [["Max steps", "80", "120"], ["Rank", "32", "8"]]
    one = page.list.runs.index(1)
    page.list.selectionModel().select(one, QItemSelectionModel.SelectionFlag.ClearAndSelect)
    drawn(page, qtbot)
    assert page.run.summary.name == "one"
    assert not page.progress.difference.isVisible()


def test_charts_are_moved_and_read_with_the_keyboard(page, qtbot, tmp_path):
    write_run(tmp_path, "run", 400)
    drawn(page, qtbot)
    board = page.progress.board
    chart = board.loss
    full = chart.plot.steps
    chart.plot.setFocus()
    qtbot.keyClick(chart.plot, Qt.Key.Key_Plus)
    near = chart.plot.steps
    assert near[1] - near[0] < full[1] - full[0]
    qtbot.waitUntil(lambda: board.rates.plot.steps == near)  # the others follow
    qtbot.keyClick(chart.plot, Qt.Key.Key_Right)
    step = round(chart.cursor_step)
    assert f"{step:,}" in chart.readout.text()
    assert chart.plot.accessibleDescription().startswith(chart.readout.text())
    qtbot.keyClick(chart.plot, Qt.Key.Key_Home)
    assert chart.plot.steps == full
    page.progress.set_logarithmic(True)
    low, high = chart.plot.values
    assert low < -0.5 < high  # powers of ten


def test_a_run_whose_folder_was_renamed_is_said_to_be_gone_and_leaves_the_list_on_a_click(page, qtbot, tmp_path):
    write_run(tmp_path, "well", 30)
    moved = write_run(tmp_path, "moved", 30)
    qtbot.waitUntil(lambda: len(listed(page)) == 2)
    page.list.choose(moved.path)
    qtbot.waitUntil(lambda: page.run is not None and page.run.directory.path == moved.path and page.run.loaded)
    assert not page.failure_banner.leave.isVisibleTo(page)
    moved.path.rename(tmp_path / "renamed")
    qtbot.waitUntil(lambda: page.failure_banner.leave.isVisibleTo(page))
    qtbot.waitUntil(lambda: page.header.state.text() == "Folder deleted or moved")
    assert not page.header.buttons["runs.folder"].isVisibleTo(page)
    place = page.list.runs.index_of(moved.path)
    assert "Folder deleted or moved" in page.list.runs.data(place, Qt.ItemDataRole.AccessibleTextRole)
    page.failure_banner.leave.click()
    assert [name for name, _ in listed(page)] == ["well"]
    assert not page.failure_banner.leave.isVisibleTo(page)


def test_a_run_whose_disk_is_taken_away_is_said_to_be_out_of_reach_until_it_is_there_again(page, qtbot, tmp_path):
    run = write_run(tmp_path / "disk" / "runs", "run", 30)
    qtbot.waitUntil(lambda: page.run is not None and page.run.loaded)
    (tmp_path / "disk").rename(tmp_path / "unplugged")
    qtbot.waitUntil(lambda: page.header.state.text() == "Drive not connected")
    qtbot.waitUntil(lambda: "disk is not connected" in page.failure_banner.sentence.text())
    place = page.list.runs.index_of(run.path)
    said = Qt.ItemDataRole.AccessibleTextRole
    qtbot.waitUntil(lambda: "Drive not connected" in page.list.runs.data(place, said))
    (tmp_path / "unplugged").rename(tmp_path / "disk")
    qtbot.waitUntil(lambda: page.header.state.text() == "Done")
    qtbot.waitUntil(lambda: not page.failure_banner.isVisibleTo(page))


def test_an_interrupted_run_says_its_step_and_what_resuming_repeats_or_that_its_status_is_damaged(
    page, qtbot, tmp_path
):
    directory = write_run(tmp_path, "killed", 600, done=340, state="running")
    directory.write_status(Status("running", "train", 337, 600, 1, 1.0))
    write_checkpoint(directory, 300)
    qtbot.waitUntil(lambda: page.run is not None and page.run.loaded and page.failure_banner.isVisibleTo(page))
    assert "Step 340 of 600" in page.header.facts.text()
    assert page.header.phases.bars["train"].amount == "340 / 600"
    assert "step 300. 40 later step" in page.failure_banner.sentence.text()
    directory.status.write_text("[" * 1000, encoding="utf-8")
    damaged = f"Could not read {directory.status}: "
    qtbot.waitUntil(lambda: page.failure_banner.sentence.text().startswith(damaged))


def test_a_folder_that_is_damaged_or_gone_is_told_on_its_entry_and_above_it(page, qtbot, tmp_path):
    write_run(tmp_path, "well", 30)
    broken, gone = write_run(tmp_path, "broken", 30), write_run(tmp_path, "gone", 30)
    broken.run.write_text("{", encoding="utf-8")
    qtbot.waitUntil(lambda: len(listed(page)) == 3)
    shutil.rmtree(gone.path)
    qtbot.waitUntil(lambda: ("gone", "unknown") in listed(page))
    for directory, words in ((broken, "damaged"), (gone, "moved, renamed or deleted")):
        page.list.choose(directory.path)
        qtbot.waitUntil(lambda words=words: words in page.failure_banner.sentence.text())
        place = page.list.runs.index_of(directory.path)
        assert words in page.list.runs.data(place, Qt.ItemDataRole.AccessibleTextRole)
    page.list.setFocus()
    page.forget()
    assert "gone" not in [name for name, _ in listed(page)]
    page.list.selectAll()
    page.forget()
    qtbot.waitUntil(lambda: page.run is None and not page.list.paths)
    assert page.header.name.text() == "No run"


def test_another_page_can_ask_for_a_run(window, qtbot, tmp_path):
    write_run(tmp_path, "latest", 20)
    wanted = write_run(tmp_path, "wanted", 20)
    write_run(tmp_path, "later", 20)
    window.session.navigator.run.emit(wanted.path)
    page = shown_page(window, RunsPage)
    qtbot.waitUntil(lambda: page.run is not None and page.run.directory.path == wanted.path)
    assert page.list.paths == [wanted.path]


def test_nothing_is_read_while_nobody_looks(page, window, qtbot, tmp_path):
    write_run(tmp_path, "run", 20)
    qtbot.waitUntil(lambda: len(listed(page)) == 1)
    window.show_images()
    assert not page._reading.isActive()
    assert not page._scanning.isActive()
    assert not page.progress._gpu_timer.isActive()


def test_a_run_of_very_many_steps_is_opened_in_pieces(page, qtbot, tmp_path):
    write_run(tmp_path, "short", 20)
    drawn(page, qtbot)  # with what draws
    directory = write_run(tmp_path, "long", 10_000)  # tests/benchmarks/app_runs.py times 100,000: 50 ms a piece at most
    painted: list[set[Chart]] = [set()]

    class Watch(QObject):
        def eventFilter(self, watched: QObject, event: QEvent) -> bool:  # noqa: N802
            if event.type() == QEvent.Type.Paint:
                painted[-1].add(watched)
            return False

    watch = Watch()
    for chart in page.findChildren(Chart):
        chart.plot.installEventFilter(watch)
    timer = QTimer()
    timer.timeout.connect(lambda: painted.append(set()))
    timer.start(0)
    page.open(directory.path)
    qtbot.waitUntil(lambda: page.run.directory.path == directory.path)
    drawn(page, qtbot)
    timer.stop()
    assert len(page.run.series.loss) == 10_000
    assert max(map(len, painted)) <= 2  # charts are what costs: after two at most the window answers


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A real engine that trains a tiny base for longer than the test waits; with its run's folder."""
    base = tiny_base("sd15", tmp_path / "base", form="single", depth=1)
    job = write_job(tmp_path / "jobs ü", base, photographs(tmp_path / "pictures", count=4), name="to be killed")
    rare = ("validation.every", "previews.every", "saving.every_steps", "saving.checkpoint_every")
    settings = ["recipe.steps=5000", *(f"report.{rhythm}=5000" for rhythm in rare)]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "trainer", "train", str(job), *words]
    with (
        (tmp_path / "out.txt").open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=dict(os.environ)) as engine,
    ):
        yield engine, tmp_path / "jobs ü" / "runs" / "to be killed"
        engine.kill()


def test_an_engine_that_is_killed_is_seen_in_two_seconds_with_its_last_words(engine, page, window, qtbot, tmp_path):
    process, folder = engine
    qtbot.waitUntil(lambda: (folder / "run.json").is_file() or process.poll() is not None)
    assert process.poll() is None, (tmp_path / "out.txt").read_text(encoding="utf-8")
    qtbot.waitUntil(lambda: page.run is not None and len(page.run.series.loss) > 3)
    assert listed(page) == [("to be killed", "running")]
    assert not page.failure_banner.isVisible()
    with RunDirectory(folder).console.open("a", encoding="utf-8") as console:
        console.write("the last that was said\n")
    process.kill()
    process.wait()
    looks: list[None] = []  # the page looks by a clock: so many looks are so many seconds, however busy the machine is
    page._reading.timeout.connect(lambda: looks.append(None))
    qtbot.waitUntil(page.failure_banner.isVisible)
    assert len(looks) * page._reading.interval() <= SEEN_WITHIN
    assert "Resume" in page.failure_banner.sentence.text()
    assert page.failure_banner.last_words.toPlainText().endswith("the last that was said")
    qtbot.waitUntil(lambda: listed(page) == [("to be killed", "interrupted")])
    window.commands.refresh_now()
    assert window.commands["runs.resume"].isEnabled()
