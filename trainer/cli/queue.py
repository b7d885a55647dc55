"""Commands for the queue: run it, list it, and add, remove, move, pause, stop and resume entries."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trainer.cli import words
from trainer.cli.common import Commands, add_command, add_set, echo, echo_json, echo_lines, note, positive
from trainer.cli.jobs import handling_sigusr1
from trainer.errors import EXIT_DONE, EXIT_RESUMABLE, JobError, RunError
from trainer.protocol.queue import Entry, Queue, QueueSnapshot
from trainer.protocol.reading import parse_json
from trainer.protocol.records import to_record
from trainer.protocol.run_directory import find_run

_HELP = "train jobs one after another, one per GPU at a time; without a subcommand: run the queue"
_EDITS: dict[str, tuple[str, Callable[[Queue, str], object]]] = {
    "remove": ("remove an entry; its run stays on disk", Queue.remove),
    "pause": ("pause a running or waiting entry; it keeps its place", Queue.pause),
    "stop": ("stop a running entry and save its current LoRA; a waiting entry is only marked as stopped", Queue.stop),
    "withdraw": ("withdraw a pause or stop that the run has not read yet", Queue.withdraw),
}
_WHOLE: dict[str, tuple[str, Callable[[Queue], object]]] = {
    "hold": ("start no new jobs until `queue resume`; running jobs continue", Queue.hold),
    "clear": ("remove all done, stopped and failed entries", Queue.clear),
}
_DELAY = re.compile(r"\+(?:(\d+)h)?(?:(\d+)m)?")


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    queue = add_command(commands, "queue", _HELP, run_worker)
    inner = queue.add_subparsers(title="commands", metavar="COMMAND", help="what to do (default: run)")
    add_command(inner, "run", "run the queued jobs; started jobs keep running if you close this", run_worker)
    _add_json(add_command(inner, "list", "show what is in the queue", run_list))

    add = add_command(inner, "add", "append a snapshot of a job, or a run to continue", run_add)
    add.add_argument("what", metavar="JOB|RUN", help="a job.toml, or the name or folder of a run")
    add_set(add, "for a job: override a key in its snapshot, such as recipe.rank=32; repeatable")
    add.add_argument("--steps", type=positive, help="for a run: new total number of steps, to train longer")
    add.add_argument("--before", metavar="ID", help="put it before this entry instead of at the end")
    add.add_argument(
        "--after", metavar="TIME", type=moment, help="don't start earlier: 22:30, 2026-11-22T22:30, or +2h30m"
    )
    add.add_argument("--hold", action="store_true", help="start no new jobs if this one fails")
    _add_json(add)

    move = add_command(inner, "move", "move an entry before another, or to the end", run_move)
    _add_entry(move)
    move.add_argument("--before", metavar="ID", help="the entry to put it before (default: move to the end)")

    after = add_command(inner, "after", "don't start an entry before a given time", run_after)
    _add_entry(after)
    after.add_argument("time", metavar="TIME", type=moment, help="22:30, 2026-11-22T22:30, +2h30m, or now")

    for name, (what, _) in _EDITS.items():
        edit = add_command(inner, name, what, run_edit)
        _add_entry(edit)
        edit.set_defaults(name=name)
    for name, (what, _) in _WHOLE.items():
        add_command(inner, name, what, run_whole).set_defaults(name=name)
    resume = add_command(inner, "resume", "release the hold, or put one entry back in line", run_resume)
    resume.add_argument(
        "entry",
        metavar="ID",
        nargs="?",
        help="a paused, interrupted, stopped or failed entry (default: the whole queue)",
    )
    failing = add_command(inner, "on-failure", "choose whether the queue continues after a failed job", run_on_failure)
    failing.add_argument(
        "what", choices=("hold", "continue"), help="hold: start no new jobs; continue: start the next one"
    )


def run_worker(options: argparse.Namespace) -> int:
    """Run the queued jobs until none is left."""
    from trainer.queue import Worker

    def report(line: str) -> None:
        echo(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S} {line}")

    queue = Queue()
    try:
        # Each run that receives the signal pauses itself; the worker stays alive to record how the run ended.
        with handling_sigusr1(lambda *_: None):
            won = Worker(queue, report).run()
        if not won:
            note("The queue is already running. `queue list` shows its jobs.")
            return EXIT_DONE
    except KeyboardInterrupt:
        note("The queue stopped; jobs that it started continue. Start it again with `queue`.")
        return EXIT_RESUMABLE
    reading = queue.read()
    if reading.held:
        _report_hold(reading)
    return EXIT_DONE


def run_list(options: argparse.Namespace) -> int:
    """Show the queue."""
    queue = Queue()
    reading, worked_on = queue.read(), queue.worker_alive()
    if options.json:
        echo_json(_plain(reading) | {"worker": worked_on})
        return EXIT_DONE
    if reading.entries:
        echo_lines(words.columns([("ID", "STATE", "NAME", "WHERE", "REMARK"), *map(_row, reading.entries)]))
    else:
        note("The queue is empty. Add a job with `python -m trainer queue add job.toml`.")
    for fault in reading.faults:
        note(f"{fault.sentence}{f' Remove it with `queue remove {fault.id}`.' if fault.id else ''}")
    if reading.held:
        _report_hold(reading)
    elif not worked_on and any(entry.state in ("waiting", "running") for entry in reading.entries):
        note("The queue is not running. Start it with `python -m trainer queue`.")
    return EXIT_DONE


def run_add(options: argparse.Namespace) -> int:
    """Add a job or a run to the queue."""
    queue, path = Queue(), Path(options.what)
    if path.is_file() or path.suffix == ".toml":
        if options.steps is not None:
            raise JobError("queue.steps", "--steps is for runs; this is a job.", "Set recipe.steps in the job.")
        entry = queue.add(
            path, after=options.after, hold=options.hold, before=options.before, text=_changed_text(path, options.set)
        )
    else:
        if options.set:
            remedy = "Name a job.toml, or extend the run with --steps."
            raise JobError("queue.set", "--set is for jobs; a run keeps the settings it started with.", remedy)
        entry = queue.add_run(find_run(options.what).path, options.steps)
        if options.before is not None:
            queue.move(entry.id, options.before)
    if options.json:
        echo_json(_plain(entry))
    else:
        echo(f"{entry.id}  {entry.name}")
    if not queue.worker_alive():
        note("The queue is not running. Start it with `python -m trainer queue`.")
    return EXIT_DONE


def _changed_text(path: Path, overrides: Sequence[str]) -> str | None:
    """Return a job's text with --set applied, once it is valid; None without --set. Raises JobError."""
    if not overrides:
        return None
    from trainer.config.load import parse_job, read_job_text, text_with_overrides

    text = text_with_overrides(read_job_text(path), path.name, overrides)
    parse_job(text, path.name, path.absolute().parent)
    return text


def run_move(options: argparse.Namespace) -> int:
    """Move an entry."""
    queue = Queue()
    queue.move(_named(queue, options.entry), _named(queue, options.before) if options.before else None)
    return EXIT_DONE


def run_after(options: argparse.Namespace) -> int:
    """Set the earliest time at which an entry may start."""
    queue = Queue()
    queue.start_after(_named(queue, options.entry), options.time if options.time > time.time() else None)
    return EXIT_DONE


def run_edit(options: argparse.Namespace) -> int:
    """Run a command that changes one entry."""
    queue = Queue()
    _EDITS[options.name][1](queue, _named(queue, options.entry))
    return EXIT_DONE


def run_whole(options: argparse.Namespace) -> int:
    """Run a command that changes the whole queue."""
    _WHOLE[options.name][1](Queue())
    return EXIT_DONE


def run_resume(options: argparse.Namespace) -> int:
    """Put the given entry back in the queue; without one, release the hold and put interrupted entries back."""
    queue = Queue()
    if options.entry is None:
        queue.release()
    else:
        queue.resume(_named(queue, options.entry))
    return EXIT_DONE


def run_on_failure(options: argparse.Namespace) -> int:
    """Set whether the queue continues after a failed job."""
    Queue().set_hold_on_failure(options.what == "hold")
    return EXIT_DONE


def moment(text: str) -> float:
    """Parse `text` as a time in Unix seconds, for argparse; a time of day means its next occurrence."""
    now = datetime.now().astimezone()
    if text == "now":
        return now.timestamp()
    if (delay := _DELAY.fullmatch(text)) and any(delay.groups()):
        hours, minutes = (int(part or 0) for part in delay.groups())
        return (now + timedelta(hours=hours, minutes=minutes)).timestamp()
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            hour, minute = map(int, text.split(":"))
            today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return (today if today > now else today + timedelta(days=1)).timestamp()
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError("is not a time; use 22:30, 2026-11-22T22:30, +2h30m or now") from error


def _named(queue: Queue, text: str) -> str:
    """Return the id of the entry whose name is `text` or whose id starts with it.

    Raises RunError unless exactly one entry matches.
    """
    reading = queue.read()
    ids = [entry.id for entry in reading.entries] + [fault.id for fault in reading.faults if fault.id]
    by_name = [entry.id for entry in reading.entries if entry.name == text]
    found = by_name or [name for name in ids if name.startswith(text)]
    if len(found) != 1:
        sentence = f'"{text}" matches {", ".join(found)}.' if found else f'There is no entry "{text}" in the queue.'
        raise RunError("queue.none", sentence, "Specify the ID of an entry; `queue list` shows them.")
    return found[0]


def _row(entry: Entry) -> tuple[str, ...]:
    where = str(entry.run or entry.job)
    after = f"after {datetime.fromtimestamp(entry.after, UTC).astimezone():%Y-%m-%d %H:%M}" if entry.after else ""
    requested = f"{entry.wish} requested" if entry.wish else ""
    return (
        entry.id,
        entry.state,
        entry.name,
        where,
        entry.problem or requested or (after if entry.state == "waiting" else ""),
    )


def _plain(value: Any) -> Any:
    return parse_json(json.dumps(to_record(value), default=str))


def _report_hold(reading: QueueSnapshot) -> None:
    why = f" {reading.reason}" if reading.reason else ""
    note(f"The queue is on hold: no new jobs start.{why} Release the hold with `queue resume`.")


def _add_entry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("entry", metavar="ID", help="the entry's ID, the start of its ID, or its name")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
