"""Commands that control and show runs through their folders: stop, pause, save, sample, watch, runs, prune."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import get_args

from trainer.cli import words
from trainer.cli.common import Commands, add_command, add_json, add_run, echo, echo_lines, note
from trainer.errors import EXIT_DONE, EXIT_FAULT, EXIT_RESUMABLE, RunError
from trainer.protocol import commands as protocol
from trainer.protocol import events, places
from trainer.protocol.queue import Queue
from trainer.protocol.run_directory import RunDirectory, find_run, known_runs

_POLL = 0.2  # seconds; the run's folder is the only interface, and it sends no change notifications
_HELP: dict[protocol.CommandName, str] = {
    "stop": "end the run now with a checkpoint and its LoRA so far; `resume` can still continue it",
    "pause": "end the run now with a checkpoint, which frees the GPU; `resume` continues it",
    "save": "write the LoRA and a checkpoint after this step, and continue training",
    "sample": "render the previews after this step, and continue training",
}
_ENDING = ("stop", "pause")
_EXIT_CODES = {"done": EXIT_DONE, "paused": EXIT_RESUMABLE, "stopped": EXIT_RESUMABLE, "failed": EXIT_FAULT}


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    for name in get_args(protocol.CommandName):
        ask = add_command(commands, name, _HELP[name], run_command)
        add_run(ask)
        ask.add_argument(
            "--timeout",
            type=float,
            default=600.0,
            metavar="SECONDS",
            help="how long to wait for the result (default 600)",
        )
        if name in _ENDING:
            ask.add_argument(
                "--withdraw",
                action="store_true",
                help=f"withdraw a pending {name}: a run that has not read it yet continues",
            )
        ask.set_defaults(name=name, withdraw=False)
    watch = add_command(commands, "watch", "follow a run until it ends; Ctrl-C stops watching, not the run", run_watch)
    add_run(watch)
    add_json(watch)
    add_command(commands, "runs", "list the runs on this PC, most recent first", run_runs)
    prune = add_command(commands, "prune", "delete cached images and captions that no resumable run needs", run_prune)
    prune.epilog = (
        "Runs do this automatically, least recently used entries first, while the cache is larger than the environment "
        "variable IMPASTO_CACHE_GB allows (default: 60 GB)."
    )
    prune.add_argument("--dry-run", action="store_true", help="only show what would be deleted")


def run_command(options: argparse.Namespace) -> int:
    """Send a command to a running engine, wait for its result and print it."""
    run = find_run(options.run)
    if not run.is_alive():
        raise RunError(
            "run.not_running",
            f'The run "{run.name}" is not running: it is {run.state()}.',
            f"Continue it with `python -m trainer resume {words.quoted(run.name)}`."
            if run.state() != "done"
            else "There is nothing to do.",
        )
    if options.withdraw:
        return _withdraw(run, options.name)
    answer = _wait_for_answer(run, options.name, options.timeout)
    if answer is None:
        echo(f'The run "{run.name}" ended before it read the command: it is {run.state()}.')
        return EXIT_DONE if options.name in _ENDING else EXIT_FAULT
    echo(f"{options.name}: {answer.outcome}{', ' if answer.detail else ''}{answer.detail}")
    return EXIT_DONE if answer.outcome == "done" else EXIT_FAULT


def _withdraw(run: RunDirectory, name: protocol.CommandName) -> int:
    """Withdraw a pending stop or pause, also from the queue, because its worker would send it again."""
    queue = Queue()
    entries = [one.id for one in queue.entries() if one.run == run.path and one.state == "running" and one.wish == name]
    for entry in entries:
        queue.withdraw(entry)
    if protocol.withdraw(run.commands, name) or entries:
        echo(f'The run "{run.name}" continues: {name} was withdrawn.')
        return EXIT_DONE
    raise RunError(
        "run.not_withdrawn",
        f'Could not withdraw {name}: none is pending for the run "{run.name}".',
        f"If the run has read it already, `python -m trainer resume {words.quoted(run.name)}` continues it afterwards.",
    )


def _wait_for_answer(run: RunDirectory, name: protocol.CommandName, timeout: float) -> protocol.CommandResult | None:
    """Send a command and return its answer; None if the engine ended without one.

    For stop and pause, returns only after the engine has ended. If there is no answer within `timeout` seconds, returns
    a failed result.
    """
    sent = protocol.send(run.commands, name)
    deadline = time.monotonic() + timeout
    while True:
        alive = run.is_alive()  # check before reading the answer: an engine answers and then ends
        answer = protocol.answer(sent)
        if not alive or (answer is not None and not (name in _ENDING and answer.outcome == "done")):
            return answer
        if time.monotonic() >= deadline:
            late = f"no answer within {timeout:g} seconds; the run will read the command as soon as it can"
            return answer or protocol.CommandResult("failed", late)
        time.sleep(_POLL)


def run_watch(options: argparse.Namespace) -> int:
    """Show a run's events until it ends and return the run's exit code."""
    from trainer.cli.display import open_display

    run = find_run(options.run)
    past, offset = events.read_events(run.events)
    last = past[-1] if past else None
    seen = len(past)
    try:
        with open_display(sys.stdout, as_json=options.json, past=past) as show:
            for event in _follow(run, offset):
                last, seen = event, seen + 1
                show(event)
    except KeyboardInterrupt:
        return EXIT_DONE
    if isinstance(last, events.Finished):
        if seen == len(past) and not options.json:
            echo(words.finish(last))
        return _EXIT_CODES[last.outcome]
    return _report_interrupted(run)


def _report_interrupted(run: RunDirectory) -> int:
    if run.state() == "new":
        raise RunError("run.new", f'The run "{run.name}" never started.', "Start its job again with `train`.")
    note(
        f'The run "{run.name}" stopped unexpectedly: it was killed, or the computer shut down.\n'
        f"What to do: continue from its last checkpoint with `python -m trainer resume {words.quoted(run.name)}`; "
        f"if it happens again, see {run.console}."
    )
    return EXIT_RESUMABLE


def _follow(run: RunDirectory, offset: int) -> Iterator[events.Event]:
    """Yield events starting at byte `offset` as they are written, until the engine has ended and all are read."""
    while True:
        alive = run.is_alive()
        new, offset = events.read_events(run.events, offset)
        yield from new
        if not new:
            if not alive:
                return
            time.sleep(_POLL)


def run_runs(options: argparse.Namespace) -> int:
    """List this user's runs, the most recently started one first."""
    rows = [_row(RunDirectory.open(path)) for path in known_runs()]
    if rows:
        echo_lines(words.columns([("RUN", "STATE", "STEP", "STARTED", "FOLDER"), *rows]))
    else:
        note("There are no runs yet. Start one with `python -m trainer train job.toml`.")
    return EXIT_DONE


def _row(run: RunDirectory) -> tuple[str, ...]:
    try:
        state, attempts = run.state(), run.attempts()
    except RunError:
        return run.name, "damaged", "", "", str(run.path)
    status = run.read_status()
    step = f"{status.step}/{status.steps}" if status else ""
    started = attempts[-1].get("started") if attempts else None
    when = f"{datetime.fromtimestamp(started, UTC).astimezone():%Y-%m-%d %H:%M}" if isinstance(started, float) else ""
    return run.name, state, step, when, str(run.path)


def run_prune(options: argparse.Namespace) -> int:
    """Delete cache entries that no resumable run needs, and print how much was deleted."""
    from trainer.training.run.cache_pruning import prune

    limit = places.cache_limit() / 1e9
    pruned = prune(dry_run=options.dry_run)
    verb = "Would delete" if options.dry_run else "Deleted"
    deleted = f"{words.counted(pruned.deleted, 'entry', 'entries')}, {words.size(pruned.deleted_bytes)}"
    kept = f"{words.counted(pruned.kept, 'entry', 'entries')}, {words.size(pruned.kept_bytes)}"
    echo(f"{verb} {deleted}; kept {kept}. The cache limit is {limit:g} GB.")
    return EXIT_DONE
