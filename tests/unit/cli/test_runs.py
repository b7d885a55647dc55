"""The commands that speak to runs, against an engine in a process of its own that only keeps the protocol."""

import json
import subprocess
import sys
import threading

import pytest

from trainer import cli
from trainer.protocol import commands, events
from trainer.protocol.run_directory import RunDirectory, Status

ENGINE = """
import sys, time
from pathlib import Path
from trainer.protocol import commands, events
from trainer.protocol.run_directory import RunDirectory, Status

run, answers = RunDirectory.open(Path(sys.argv[1])), sys.argv[2]
with run.hold(), events.EventWriter(run.events, run.begin_attempt({})) as writer:
    def tell(event): writer.write(event)
    def status(state): run.write_status(Status(state, "train", 7, 10, 1, time.time()))
    status("running")
    tell(events.AttemptStarted(1, "cpu"))
    tell(events.PhaseStarted("train", 10))
    for step in range(1, 8):
        tell(events.StepEvent(step, 0, 0.5, 1.0, {"unet": 1e-4}, 4, 1.0))
    print("ready", flush=True)
    while answers in ("yes", "slowly") and sys.stdin.readline():  # a line says: look
        for command in commands.pending(run.commands):
            if command.name in ("save", "sample"):
                commands.finish(command, "done", command.name + "d it") if command.name == "save" else commands.finish(
                    command, "refused", "there are no prompts")
                continue
            outcome = "stopped" if command.name == "stop" else "paused"
            tell(events.Finished(outcome, 7, None))
            status(outcome)
            commands.finish(command, "done", "step 7")
            if answers == "slowly":
                print("answered", flush=True)
                sys.stdin.readline()
            sys.exit(75)
    sys.stdin.readline()
    if answers == "dies":
        for step in (8, 9, 10): tell(events.Skipped(step, "loss"))
        tell(events.Finished("done", 10, "style.safetensors"))
        status("done")
"""


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "runs", "my-style")


@pytest.fixture
def engine(run, monkeypatch):
    """Starts the engine: answers "yes", "slowly" (ends when told), "never", or "dies" (ends when told).

    One that answers is told to look when something is sent.
    """
    children, listening = [], []
    send = commands.send

    def send_and_tell(*arguments):
        sent = send(*arguments)
        for child in listening:
            child.stdin.write("look\n")
            child.stdin.flush()
        return sent

    monkeypatch.setattr(commands, "send", send_and_tell)

    def start(answers):
        child = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(run.path), answers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        if answers in ("yes", "slowly"):
            listening.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@pytest.mark.parametrize(("name", "state"), [("stop", "stopped"), ("pause", "paused")])
def test_stop_and_pause_wait_until_the_engine_has_ended(run, engine, capsys, name, state):
    child = engine("yes")
    assert cli.main([name, "my-style"]) == 0
    assert capsys.readouterr().out == f"{name}: done, step 7\n"
    assert not run.is_alive()
    assert child.wait() == 75
    assert run.state() == state


def test_a_pending_stop_can_be_withdrawn_and_an_accepted_one_cannot(run, capsys):
    with run.hold():
        sent = commands.send(run.commands, "stop")
        assert cli.main(["pause", "my-style", "--withdraw"]) == 2
        assert "none is pending" in capsys.readouterr().err
        assert cli.main(["stop", "my-style", "--withdraw"]) == 0
        assert capsys.readouterr().out == 'The run "my-style" continues: stop was withdrawn.\n'
        assert commands.answer(sent).outcome == "withdrawn"
        commands.send(run.commands, "stop")
        commands.accept(commands.pending(run.commands)[0])
        assert cli.main(["stop", "my-style", "--withdraw"]) == 2


def test_a_stop_is_over_only_when_the_engine_has_ended(run, engine):
    child = engine("slowly")
    codes = []
    asking = threading.Thread(target=lambda: codes.append(cli.main(["stop", "my-style"])))
    asking.start()
    assert child.stdout.readline() == "answered\n"
    asking.join(timeout=1.0)
    assert asking.is_alive()  # answered, and the card not yet free
    child.stdin.write("end\n")
    child.stdin.flush()
    asking.join()
    assert codes == [0]


def test_save_and_sample_tell_the_outcome_and_the_run_goes_on(run, engine, capsys):
    engine("yes")
    assert cli.main(["save", str(run.path)]) == 0
    assert capsys.readouterr().out == "save: done, saved it\n"
    assert cli.main(["sample", "my-style"]) == 1
    assert capsys.readouterr().out == "sample: refused, there are no prompts\n"
    assert run.is_alive()


def test_a_run_that_does_not_answer_is_given_up_in_time(run, engine, capsys):
    engine("never")
    assert cli.main(["pause", "my-style", "--timeout", "0"]) == 1
    assert "no answer within 0 seconds" in capsys.readouterr().out
    assert len(commands.pending(run.commands)) == 1  # it will still be read


def test_a_run_that_ends_before_it_reads_is_told_so(run, engine, capsys, monkeypatch):
    child = engine("dies")
    real_send = commands.send

    def send_and_end(*arguments):
        sent = real_send(*arguments)
        child.stdin.write("end\n")
        child.stdin.flush()
        return sent

    monkeypatch.setattr(commands, "send", send_and_end)
    assert cli.main(["save", "my-style"]) == 1
    assert "ended before it read the command: it is done" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["stop", "pause", "save", "sample"])
def test_a_run_that_is_not_running_takes_no_commands(run, capsys, name):
    assert cli.main([name, "my-style"]) == 2
    said = capsys.readouterr().err
    assert 'The run "my-style" is not running: it is new.' in said
    assert "What to do:" in said
    assert list(run.commands.glob("*.json")) == []


@pytest.mark.parametrize(
    ("runs", "words", "code", "said"),
    [
        (["my-style"], ["stop", "my-stile"], 2, "Did you mean my-style?"),
        (["my-style"], ["watch", "my-style"], 2, "never started"),
        ([], ["runs"], 0, "There are no runs yet"),
    ],
    ids=[
        "an unknown run has near names",
        "a run that never began cannot be watched",
        "without runs the list says how to start one",
    ],
)
def test_what_is_said_where_there_is_no_such_run(tmp_path, capsys, runs, words, code, said):
    for name in runs:
        RunDirectory.create(tmp_path / "runs", name)
    assert cli.main(words) == code
    assert said in capsys.readouterr().err


def test_watching_follows_a_run_until_it_ends(run, engine):
    child = engine("dies")
    with subprocess.Popen(
        [sys.executable, "-m", "trainer", "watch", "my-style", "--json"], stdout=subprocess.PIPE, text=True
    ) as watcher:
        lines = [watcher.stdout.readline() for _ in range(9)]  # all that there is so far
        child.stdin.write("end\n")
        child.stdin.flush()
        lines += watcher.stdout.readlines()
    assert watcher.returncode == 0
    seen = [events.from_line(line.strip()) for line in lines]
    assert seen == events.read_events(run.events)[0]
    assert isinstance(seen[-1], events.Finished)


def test_watching_a_run_that_ended_tells_how(run, engine, capsys):
    engine("yes")
    assert cli.main(["stop", "my-style"]) == 0
    capsys.readouterr()
    assert cli.main(["watch", "my-style"]) == 75
    assert capsys.readouterr().out.startswith("Stopped at step 7.")


def test_watching_a_run_that_was_killed_says_how_to_go_on(run, engine, capsys):
    child = engine("never")
    child.kill()
    child.wait()
    assert cli.main(["watch", "my-style"]) == 75
    said = capsys.readouterr()
    assert "stopped unexpectedly" in said.err
    assert "resume my-style" in said.err


def test_the_list_tells_how_each_run_stands(run, engine, tmp_path, capsys):
    engine("never")
    broken = RunDirectory.create(tmp_path / "other runs", "bröken")
    broken.run.write_text("{", encoding="utf-8")
    paused = RunDirectory.create(tmp_path, "b")
    paused.begin_attempt({})
    paused.write_status(Status("paused", None, 120, 1500, 1, 0.0))
    assert cli.main(["runs"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["RUN", "STATE", "STEP", "STARTED", "FOLDER"]
    assert [line.split()[:2] for line in lines] == [["b", "paused"], ["bröken", "damaged"], ["my-style", "running"]]
    assert lines[0].split()[2] == "120/1500"
    assert lines[2].split()[2] == "7/10"
    assert lines[1].endswith(str(broken.path))


def test_json_of_a_finished_run_is_its_whole_history(run, engine, capsys):
    engine("yes")
    cli.main(["pause", "my-style"])
    capsys.readouterr()
    assert cli.main(["watch", "my-style", "--json"]) == 75
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["type"] for line in lines[:2]] == ["attempt_started", "phase_started"]
    assert json.loads(lines[-1])["outcome"] == "paused"
