"""What is asked of engines, through real run directories; the engine's side is the protocol's own functions."""

from __future__ import annotations

import pytest

from app.core.runs.runs import RunCommands
from tests.support.desk import Desk, a_desk
from tests.support.written_runs import held, new_run
from trainer.protocol import commands
from trainer.protocol.run_directory import RunDirectory


@pytest.fixture
def desk():
    with a_desk() as desk:
        yield desk


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    return new_run(tmp_path / "a folder é", "cats")


class Asker:
    """Orders, and what was heard of them."""

    def __init__(self, desk: Desk) -> None:
        self.orders = RunCommands(desk.tasks)
        self.heard: list[tuple[str, str, str]] = []
        self.problems: list[str] = []
        self.orders.answered.connect(lambda found: self.heard.append((found[0].name, *_told(found[1]))))
        self.orders.failed.connect(lambda error: self.problems.append(error.code))


def _told(answer: commands.CommandResult) -> tuple[str, str]:
    return answer.outcome, answer.detail


def answered(desk: Desk, asker: Asker, number: int) -> list[tuple[str, str, str]]:
    """Look until so many answers were heard."""

    def heard() -> bool:
        asker.orders.look()
        return len(asker.heard) >= number

    desk.until(heard)
    return asker.heard


def test_an_order_waits_until_the_engine_has_answered(desk, run):
    asker = Asker(desk)
    with held(run):
        asker.orders.send(run, "sample")
        asker.orders.send(run, "save")
        assert asker.orders.waiting(run) == ["sample", "save"]
        desk.until(lambda: len(commands.pending(run.commands)) == 2)
        first, second = commands.pending(run.commands)
        assert {first.name, second.name} == {"sample", "save"}
        commands.finish(first, "done", "previews of step 5")
        assert answered(desk, asker, 1) == [(first.name, "done", "previews of step 5")]
        assert asker.orders.waiting(run) == [second.name]
        commands.finish(second, "refused", "There is no room.")
        assert answered(desk, asker, 2)[1] == (second.name, "refused", "There is no room.")
    assert asker.orders.waiting(run) == []


def test_an_engine_that_dies_leaves_orders_void_also_when_it_goes_on_later(desk, run):
    asker = Asker(desk)
    with held(run):
        asker.orders.send(run, "pause")
        desk.until(lambda: commands.pending(run.commands))
    assert answered(desk, asker, 1) == [("pause", "void", "")]
    with held(run):  # it answers what a former attempt left
        asker.orders.send(run, "save")
        desk.until(lambda: commands.pending(run.commands))
        assert [command.name for command in commands.pending(run.commands)] == ["save"]
    with held(run):
        assert answered(desk, asker, 2)[1] == ("save", "void", "The run ended before it read the command.")


@pytest.mark.parametrize(
    ("order", "state", "outcome"),
    [("pause", "paused", "done"), ("stop", "stopped", "done"), ("stop", "paused", "void"), ("save", "paused", "void")],
)
def test_what_another_window_asked_for_as_well_is_done_though_the_engine_read_only_one(
    desk, run, order, state, outcome
):
    asker = Asker(desk)
    with held(run) as engine:
        asker.orders.send(run, order)
        desk.until(lambda: commands.pending(run.commands))
        engine.stand(state, 30)
    assert answered(desk, asker, 1) == [(order, outcome, "")]


def test_orders_to_other_runs_are_kept_apart(desk, run, tmp_path):
    asker, other = Asker(desk), new_run(tmp_path, "dogs")
    asker.orders.send(run, "save")
    assert asker.orders.waiting(other) == []
    assert asker.orders.waiting(RunDirectory(run.path)) == ["save"]


def test_a_disk_that_is_gone_is_told(desk, run):
    asker = Asker(desk)
    run.commands.joinpath("done").rmdir()
    run.commands.rmdir()
    asker.orders.send(run, "save")
    desk.until(lambda: asker.problems)
    assert asker.problems == ["run.command"]
    assert asker.orders.waiting(run) == []


def test_an_answer_that_is_damaged_is_no_fault_of_ours(desk, run):
    asker = Asker(desk)
    with held(run):
        asker.orders.send(run, "save")
        desk.until(lambda: commands.pending(run.commands))
        (run.commands / "done" / commands.pending(run.commands)[0].path.name).write_text("{", encoding="utf-8")
        assert answered(desk, asker, 1)[0][:2] == ("save", "failed")
