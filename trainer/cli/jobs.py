"""Commands that run jobs: train, resume."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.common import Commands, add_command, add_json, add_run, add_set, engine_imports, positive
from trainer.errors import EXIT_DONE, ImpastoError, JobError
from trainer.protocol import events, files
from trainer.protocol.run_directory import RunDirectory, find_run, newest_run, require_writable

if TYPE_CHECKING:
    from types import FrameType

    from trainer.config.base import Family
    from trainer.config.recipe import RecipeConfig
    from trainer.config.resolve import Machine
    from trainer.training.run.resume import Extension

OnRunFolder = Callable[[Path], None]
OnEvent = Callable[[events.Event], None]


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    train = add_command(commands, "train", "train the LoRA of a job; Ctrl-C pauses", run_train)
    train.add_argument("job", metavar="JOB", type=Path, help="the job.toml file")
    add_set(
        train,
        "override a key of the job, such as recipe.rank=32; names of other trainers work too, such as network_dim=32; "
        "repeatable",
    )
    train.add_argument("--recipe", metavar="PRESET", help="override the job's recipe with the values of this preset")
    train.add_argument(
        "--resume-if-any",
        action="store_true",
        help="continue the job's newest run where it was interrupted, with the settings it started with, or do nothing "
        "if it is finished; start one if there is none. The same command then serves each start by a scheduler",
    )
    _add_snapshot(train)
    add_json(train)
    _add_queued(train)

    resume = add_command(commands, "resume", "continue a paused, stopped, interrupted or finished run", run_resume)
    add_run(resume)
    resume.add_argument(
        "--steps",
        type=positive,
        help="new total number of steps, to train longer; the LoRA saved so far is kept",
    )
    resume.add_argument(
        "--schedule",
        choices=("stretch", "hold", "restart"),
        default="stretch",
        help="with --steps: stretch the learning-rate schedule over the new length (default), hold its last value, "
        "or restart it for the added steps",
    )
    _add_snapshot(resume)
    add_json(resume)
    _add_queued(resume)


def run_train(options: argparse.Namespace) -> int:
    """Train a job from the start, or with --resume-if-any from where its newest run ended."""

    def train(made: OnRunFolder, log: OnEvent) -> int:
        text = _frozen(options)
        with showing_events(log, as_json=options.json) as on_event:
            overrides = _overrides(options, text)
            if options.resume_if_any and (run := _newest_run(options.job, overrides, text)):
                if run.state() in ("done", "stopped"):
                    on_event(events.Notice("finished", f"The run {run.name} is finished; its LoRA is in {run.output}."))
                    return EXIT_DONE
                on_event(events.Notice("resumed", f"Continuing the run {run.name}."))
                return _resumed(run, on_event, made, memory_snapshot=options.memory_snapshot)
            _require_sound(options.job, overrides, text)
            with engine_imports(on_event):
                from trainer.cli.planning import plan_run
                from trainer.memory.device.calibration import learn
                from trainer.training.run.start import start

            snapshot = options.memory_snapshot
            return start(options.job, overrides, on_event, plan_run, learn, made, text, memory_snapshot=snapshot)

    return _carried_out(options, train)


def run_resume(options: argparse.Namespace) -> int:
    """Continue a run."""

    def resume_run(made: OnRunFolder, log: OnEvent) -> int:
        run, snapshot = find_run(options.run), options.memory_snapshot
        with showing_events(log, as_json=options.json) as on_event:
            return _resumed(run, on_event, made, options.steps, options.schedule, memory_snapshot=snapshot)

    return _carried_out(options, resume_run)


def _resumed(
    run: RunDirectory,
    on_event: OnEvent,
    made: OnRunFolder,
    steps: int | None = None,
    schedule: Extension = "stretch",
    *,
    memory_snapshot: bool,
) -> int:
    with engine_imports(on_event):
        from trainer.memory.device.calibration import learn
        from trainer.training.run.resume import resume

    return resume(
        run, on_event, steps=steps, schedule=schedule, learn=learn, made=made, memory_snapshot=memory_snapshot
    )


def _newest_run(path: Path, overrides: Sequence[str], text: str | None) -> RunDirectory | None:
    """Return the newest run of a job that an engine ever started; None if there is none."""
    from trainer.config.load import load_job

    job = load_job(path, overrides, text)
    return newest_run(Path(job.output.runs), job.name)


def _add_snapshot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-snapshot",
        action="store_true",
        help="record the GPU memory and write memory-snapshot-*.pickle into the run's folder: after loading, after "
        "the first steps, when memory runs out, and at the end; open them at pytorch.org/memory_viz",
    )


def _add_queued(parser: argparse.ArgumentParser) -> None:
    """Add the hidden --queued option, with which the queue's worker passes the id of the entry."""
    parser.add_argument("--queued", metavar="ID", help=argparse.SUPPRESS)


def _frozen(options: argparse.Namespace) -> str | None:
    """Return the text that the job had when it was queued; None if the queue did not start this command."""
    if options.queued is None:
        return None
    from trainer.protocol.queue import Queue

    if not files.long_path(options.job.absolute().parent).is_dir():
        # The saved text would be enough to train, but the run would recreate a folder that the user has deleted.
        raise JobError(
            "job.gone",
            f"The folder of the job {options.job} was deleted or moved while it waited in the queue.",
            "Restore the folder and resume the entry, or remove the entry and add the job from its new location.",
        )
    return Queue().get(options.queued).text


def _carried_out(options: argparse.Namespace, work: Callable[[OnRunFolder, OnEvent], int]) -> int:
    """Run `work` and return its exit code; if the queue started this process, record the result in its entry.

    `work` receives two callbacks: one for the run's folder and one for its events.
    """
    with handling_sigusr1(signal.default_int_handler):
        if options.queued is None:
            from trainer.cli.display import RunLog

            with closing(RunLog()) as log:
                return work(log.open, log.show)
        from trainer.queue import run_entry

        # The worker redirects all output of this process to the run's log, so events need no log of their own.
        return run_entry(options.queued, lambda made: work(made, lambda _: None))


@contextmanager
def handling_sigusr1(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Call `handler` on SIGUSR1 inside the block; the signal's default action would kill the process.

    SLURM sends SIGUSR1 shortly before a job's time limit. A run that has started handles the signal itself
    (`Control.signals`) and pauses; this function covers the time before the start, and the queue's worker. The handler
    must be a Python function and not SIG_IGN, which the engines that the worker starts would inherit.
    """
    number = getattr(signal, "SIGUSR1", None)  # Windows has none
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)


@contextmanager
def showing_events(log: OnEvent = lambda _: None, *, as_json: bool) -> Iterator[OnEvent]:
    """Yield a function that shows a run's events in this process and passes them to `log`.

    An error that ends the run is reported once: as a JSON event with --json, otherwise by the code that catches it.
    """
    from trainer.cli.display import open_display

    reported: list[str] = []

    with open_display(sys.stdout, as_json=as_json) as show:

        def on_event(event: events.Event) -> None:
            log(event)
            if isinstance(event, events.ErrorEvent):
                reported.append(event.code)
            if as_json or not isinstance(event, events.ErrorEvent):
                show(event)

        try:
            yield on_event
        except ImpastoError as error:
            if error.code not in reported:
                on_event(events.ErrorEvent(error.code, error.sentence, error.remedy))
            raise


def family_of(base: str, stated: Family | None) -> Family | None:
    """Return a base's family as read from its files, else the `stated` family; None if unknown.

    Raises JobError if `stated` contradicts the files.
    """
    from trainer.config.paths import is_base_path

    if not is_base_path(base, Path.cwd()):
        return stated
    from trainer.files.architecture import NAMES
    from trainer.files.identify import identify_base

    found = identify_base(Path(base).expanduser()).family
    if stated not in (None, found):
        sentence = f"The base is {NAMES[found]}, not {NAMES[stated]}."
        raise JobError("base.family", sentence, "Remove the family, or choose another base.")
    return found


def preset_recipe(name: str, family: Family | None) -> RecipeConfig:
    """Return the recipe from the preset `name` for `family`; raise JobError if the preset has no recipe."""
    from trainer.config.presets.library import preset_with_recipe

    recipe = preset_with_recipe(name, family).recipe
    assert recipe is not None
    return recipe


def _overrides(options: argparse.Namespace, text: str | None) -> list[str]:
    """Return the settings that override the job file: the --recipe preset's, then --set, which takes precedence."""
    if not options.recipe:
        return list(options.set)
    from trainer.config.load import load_job
    from trainer.config.presets.library import recipe_overrides

    base = load_job(options.job, options.set, text).base
    family = family_of(base.model, None if base.family == "auto" else base.family)
    return [*recipe_overrides(preset_recipe(options.recipe, family)), *options.set]


def _require_sound(job: Path, overrides: Sequence[str], text: str | None) -> None:
    """Raise ImpastoError if the job, a local base or an image folder is unreadable, or the runs folder unwritable.

    Mistakes are reported before the engine starts, which takes seconds.
    """
    from trainer.config.load import load_job
    from trainer.config.paths import is_base_path
    from trainer.dataset.folders import require_images
    from trainer.files.identify import identify_base

    wanted = load_job(job, overrides, text)
    require_writable(Path(wanted.output.runs))
    model = wanted.base.model
    if is_base_path(model, Path.cwd()):
        if Path(model).exists():
            identify_base(Path(model))
        else:
            from trainer.base.fetch import fetch_base

            fetch_base(model)  # raises an error that says what is missing
    require_images(wanted.dataset)


def machine_here() -> Machine:
    """Return the machine to choose a fit for: the GPU with the most memory, or the CPU if there is no GPU."""
    from trainer import gpu
    from trainer.config.resolve import Machine
    from trainer.host import usable_cores

    cores = usable_cores()
    device = max(gpu.list_gpus(), key=lambda device: device.total_bytes, default=None)
    if device is None:
        return Machine("cpu", None, None, bf16=True, cores=cores)
    return Machine(f"cuda:{device.index}", device.name, device.total_bytes, device.bf16, cores)
