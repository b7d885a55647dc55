import json
import time

import pytest

from trainer.protocol import commands
from trainer.protocol import files as atomic
from trainer.protocol.commands import CommandResult
from trainer.protocol.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path, "style")


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def test_a_command_is_sent_read_and_answered(run):
    sent = commands.send(run.commands, "sample", {"prompt": "a 大 house", "count": 2})
    assert commands.answer(sent) is None
    (command,) = commands.pending(run.commands)
    assert (command.name, command.arguments, command.path) == ("sample", {"prompt": "a 大 house", "count": 2}, sent)
    assert command.sent > 0
    assert commands.pending(run.commands) == [command]  # looking changes nothing
    commands.finish(command, "done", "samples/a.png")
    assert commands.pending(run.commands) == []
    assert commands.answer(sent) == CommandResult("done", "samples/a.png")
    assert files(run.commands) == []
    kept = json.loads((run.commands / "done" / sent.name).read_text(encoding="utf-8"))
    assert kept["name"] == "sample"
    assert kept["arguments"] == {"prompt": "a 大 house", "count": 2}
    assert kept["finished"] >= kept["sent"]


def test_commands_come_in_the_order_they_were_sent_also_within_one_tick_of_the_clock(run, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    sent = [commands.send(run.commands, name) for name in ("save", "sample", "pause", "stop", "save")]
    assert [command.path for command in commands.pending(run.commands)] == sent


def test_an_answer_before_a_kill_is_not_given_twice(run, monkeypatch):
    sent = commands.send(run.commands, "stop")
    (command,) = commands.pending(run.commands)

    def killed(self, missing_ok=False):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(sent), "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            commands.finish(command, "done", "step 7")
    assert files(run.commands) == [sent.name]
    assert commands.pending(run.commands) == []
    assert files(run.commands) == []
    assert commands.answer(sent) == CommandResult("done", "step 7")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        '{"name": "reboot", "arguments": {}, "sent": 1}',
        '{"name": "stop"}',
        '{"name": [], "arguments": 1}',
    ],
)
def test_what_is_no_command_is_refused_and_never_seen_again(run, text):
    path = run.commands / "by-hand.json"
    path.write_text(text, encoding="utf-8")
    good = commands.send(run.commands, "save")
    assert [command.path for command in commands.pending(run.commands)] == [good]
    assert files(run.commands) == [good.name]
    assert commands.answer(path).outcome == "refused"


def test_a_command_still_being_written_is_not_seen(run):
    with atomic.staged(run.commands / "1-stop.json") as temporary:
        temporary.write_text('{"name": "st', encoding="utf-8")
        assert commands.pending(run.commands) == []
        temporary.write_text('{"name": "stop", "arguments": {}, "sent": 1}', encoding="utf-8")
    assert [command.name for command in commands.pending(run.commands)] == ["stop"]


def test_what_a_former_attempt_left_is_voided_and_what_came_since_the_run_is_held_is_not(run):
    sent = [commands.send(run.commands, "stop"), commands.send(run.commands, "save")]
    with run.hold():
        meant = commands.send(run.commands, "pause")  # by a window that sees the run held, before it has begun
        run.begin_attempt({})
        assert [command.path for command in commands.pending(run.commands)] == [meant]
    assert [commands.answer(path).outcome for path in sent] == ["void", "void"]


def test_a_withdrawn_command_is_answered_and_cannot_be_accepted_any_more(run):
    stop, pause = commands.send(run.commands, "stop"), commands.send(run.commands, "pause")
    first, second = commands.pending(run.commands)
    assert commands.withdraw(run.commands, "stop") is True
    assert commands.answer(stop).outcome == "withdrawn" and commands.answer(pause) is None
    assert commands.accept(first) is False and commands.accept(second) is True
    assert commands.accept(second) is False, "another process claimed it"


def test_an_accepted_command_cannot_be_withdrawn(run):
    sent = commands.send(run.commands, "stop")
    assert commands.accept(commands.pending(run.commands)[0]) is True
    assert commands.pending(run.commands) == [] and commands.withdraw(run.commands, "stop") is False
    assert commands.answer(sent) is None


def test_whoever_watches_sees_which_command_ends_the_run_until_it_is_answered(run):
    assert commands.ending(run.commands) is None
    commands.send(run.commands, "save")
    assert commands.ending(run.commands) is None
    commands.send(run.commands, "pause")
    assert commands.ending(run.commands) == commands.Ending("pause", accepted=False)
    commands.send(run.commands, "stop")
    command = next(command for command in commands.pending(run.commands) if command.name == "stop")
    commands.accept(command)
    assert commands.ending(run.commands) == commands.Ending("stop", accepted=True), "what is being carried out counts"
    commands.finish(command, "done", "stopped at step 7")
    assert commands.ending(run.commands) == commands.Ending("pause", accepted=False)
    assert sorted(path.name for path in (run.commands / "accepted").iterdir()) == []


def test_what_a_killed_engine_had_accepted_is_voided(run):
    sent = commands.send(run.commands, "stop")
    commands.accept(commands.pending(run.commands)[0])
    with run.hold():
        run.begin_attempt({})
    assert commands.answer(sent) == CommandResult("void", "The run ended before this was done.")
    assert commands.ending(run.commands) is None
