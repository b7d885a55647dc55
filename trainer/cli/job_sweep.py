"""The sweep command: train one job per combination of settings, and compare the results in a table and an image.

A sweep is a file in the per-user folder that lists its jobs. The queue trains them; their results are read from their
runs, which stay comparable after their queue entries have been removed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.cli import words
from trainer.cli.common import Commands, add_command, add_set, echo, echo_json, echo_lines, note
from trainer.errors import EXIT_DONE, JobError, RunError
from trainer.protocol import events, files, places
from trainer.protocol.files import LONGEST_NAME, long_path, numbered, safe_name, valid_job_name
from trainer.protocol.progress import RunProgress
from trainer.protocol.queue import Entry, Queue, new_entry, new_id
from trainer.protocol.reading import UnusableFileError, open_file, read_record, reason_of
from trainer.protocol.records import build, json_keys, moment, to_record
from trainer.protocol.run_directory import RunDirectory, known_runs

if TYPE_CHECKING:
    from PIL import Image

_HELP = "queue one job per combination of settings, or compare the results of a sweep"
_MOST_JOBS = 100
_ENDED = ("done", "stopped", "failed", "removed")
# A value ends at a comma outside quotes and brackets, as in "[100, 500],[900]".
_VALUE = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^,])+""")
_CHANGES_LOSS = (
    *("base.", "dataset.", "recipe.resolution", "recipe.images", "recipe.seed", "report.validation."),
    *("recipe.captions.prefix", "recipe.captions.suffix", "recipe.captions.separator", "recipe.captions.secondary"),
    *("recipe.captions.wildcards", "recipe.clip_skip", "recipe.token_chunks", "recipe.caption_padding"),
)
"""Beginnings of keys that change what the loss is measured on: images, their captions, and how these are encoded."""
_CHANGES_TRAINING_LOSS = ("recipe.objective.",)
"""Beginnings of keys that change how the loss of a training step is computed, but not the loss with fixed noise."""
_CELL, _GAP, _TITLE = 256, 12, 240  # pixels
_PAPER, _INK = "#ffffff", "#222222"


@json_keys("name", "entry", "settings")
@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep."""

    name: str
    """Name of the job and of its LoRA."""
    entry: str
    """Id of its queue entry."""
    settings: Mapping[str, str]
    """Values of the swept keys, as written on the command line."""


@json_keys("name", "job", "runs", "created", "jobs")
@dataclass(frozen=True)
class JobSweep:
    """Jobs that were queued together and differ only in some settings."""

    name: str
    job: str
    """Absolute path of the job file."""
    runs: str
    """Absolute path of the folder for their runs."""
    created: float
    """Unix time in seconds."""
    jobs: Sequence[SweepJob]


@json_keys(
    "name", "settings", "state", "problem", "step", "validation_loss", "loss_on_training_images", "best_step",
    "mean_loss", "seconds", "peak_memory", "run",
)  # fmt: skip
@dataclass(frozen=True)
class JobResult:
    """Result of one job so far. Unknown values are None."""

    name: str
    settings: Mapping[str, str]
    state: str
    problem: str = ""
    step: int = 0
    validation_loss: float | None = None
    """Lowest loss with fixed noise on images held out of training."""
    loss_on_training_images: float | None = None
    """Lowest loss with fixed noise on training images, of a run without held-out images."""
    best_step: int | None = None
    """Step of the lowest loss."""
    mean_loss: float | None = None
    """Moving average of the training loss over the last steps."""
    seconds: float | None = None
    """Seconds of all attempts."""
    peak_memory: int | None = None
    """Peak bytes reserved on the GPU; without one, peak main memory of the process."""
    run: str | None = None
    """Folder of the run."""


def add_commands(commands: Commands) -> None:
    """Define the command and its arguments."""
    sweep = add_command(commands, "sweep", _HELP, run)
    sweep.add_argument(
        "what",
        metavar="JOB|NAME",
        nargs="?",
        help="with --set: the job.toml to vary; otherwise: the sweep to compare (default: list all sweeps)",
    )
    what = "try each of these values, such as recipe.rank=8,16,32; repeatable: all combinations are trained"
    add_set(sweep, what, "KEY=VALUE,VALUE")
    sweep.add_argument("--json", action="store_true", help="print one JSON object, for scripts")


def run(options: argparse.Namespace) -> int:
    """Queue the jobs of a new sweep, compare those of an existing one, or list all sweeps."""
    if options.set:
        return _run_new(options)
    if options.what is None:
        return _run_list(options)
    if Path(options.what).suffix == ".toml":
        sentence = "Could not start a sweep: no settings to vary are given."
        raise JobError("sweep.settings", sentence, "Add them, such as --set recipe.rank=8,16,32.")
    sweep = _read(options.what)
    results = results_of(sweep)
    if options.json:
        echo_json({"sweep": sweep.name, "job": sweep.job, "results": to_record(results), "grid": _grid_path(sweep)})
        return EXIT_DONE
    echo_lines(table(results))
    _note_comparability(results)
    if all(result.state in _ENDED for result in results) and draw_grid(results, Path(_grid_path(sweep))):
        echo(f"Wrote the previews of all runs to {_grid_path(sweep)}.")
    return EXIT_DONE


# --- a new sweep


def _run_new(options: argparse.Namespace) -> int:
    if options.what is None:
        sentence = "Could not start a sweep: no job is given."
        raise JobError("sweep.job", sentence, "Name the job.toml to vary: `sweep job.toml --set recipe.rank=8,16,32`.")
    sweep, entries = plan_sweep(Path(options.what), options.set)
    # The list of jobs is saved first, so that a sweep that is interrupted here can still be shown.
    long_path(_folder()).mkdir(parents=True, exist_ok=True)
    files.write_json(_file(sweep.name), {"version": 1, **to_record(sweep)})
    queue = Queue()
    for entry in entries:
        queue.put(entry)
    if options.json:
        echo_json(to_record(sweep))
    else:
        echo_lines(words.columns([("ID", "NAME"), *((job.entry, job.name) for job in sweep.jobs)]))
        counted = words.counted(len(sweep.jobs), "job", "jobs")
        echo(f"Added {counted}. Compare them with `python -m trainer sweep {words.quoted(sweep.name)}`.")
    if not queue.worker_alive():
        note("The queue is not running. Start it with `python -m trainer queue`.")
    return EXIT_DONE


def plan_sweep(path: Path, values: Sequence[str]) -> tuple[JobSweep, list[Entry]]:
    """Return a sweep over all combinations of `values` ("KEY=VALUE,VALUE"), and a queue entry for each of its jobs.

    Every job is validated; nothing is written. Raises JobError if one is invalid or there is nothing to compare.
    """
    from trainer.config.load import parse_job, read_job_text, text_with_overrides
    from trainer.config.toml_file import toml_value

    points, text, folder = combinations(values), read_job_text(path), path.absolute().parent
    base = parse_job(text, path.name, folder)
    name = next(each for each in numbered(valid_job_name(base.name)) if not long_path(_file(each)).exists())
    jobs, entries = [], []
    for job_name, point in zip(_job_names(name, points), points, strict=True):
        overrides = [*(f"{key}={value}" for key, value in point.items()), f"name={toml_value(job_name)}"]
        varied = text_with_overrides(text, path.name, overrides)
        parse_job(varied, f"{path.name} with {_settings_text(point)}", folder)
        entry = new_entry(path, name=new_id(), text=varied)
        jobs.append(SweepJob(job_name, entry.id, point))
        entries.append(entry)
    return JobSweep(name, str(path.absolute()), base.output.runs, time.time(), jobs), entries


def combinations(values: Sequence[str]) -> list[dict[str, str]]:
    """Return every combination of the values in `values` ("KEY=VALUE,VALUE"), the last key varying fastest.

    Raises JobError if a key is missing or repeated, or unless there are 2 to 100 combinations.
    """
    options: dict[str, list[str]] = {}
    for text in values:
        key, equals, listed = text.partition("=")
        key, found = key.strip(), list(dict.fromkeys(each.strip() for each in _VALUE.findall(listed)))
        if not equals or not key or not all(found) or not found:
            sentence = f"Could not start a sweep: --set {text} is not of the form KEY=VALUE,VALUE."
            raise JobError("sweep.form", sentence, "Write it like recipe.rank=8,16,32.")
        if key in options or key == "name":
            why = "each job of a sweep gets its own name" if key == "name" else f"{key} is given twice"
            remedy = "Remove it." if key == "name" else "List all its values, separated by commas."
            raise JobError("sweep.key", f"Could not start a sweep: {why}.", remedy)
        options[key] = found
    points = [dict(zip(options, point, strict=True)) for point in itertools.product(*options.values())]
    if len(points) == 1:
        sentence = "Could not start a sweep: there is only one combination of settings."
        raise JobError("sweep.single", sentence, "Give at least two values, such as --set recipe.rank=8,16.")
    if len(points) > _MOST_JOBS:
        sentence = f"Could not start a sweep: it would train {len(points):,} jobs; at most {_MOST_JOBS} are allowed."
        raise JobError("sweep.many", sentence, "Use fewer values, or several sweeps.")
    return points


def _job_names(sweep: str, points: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a unique name for each job: its settings, or its number if that would be too long for a file name."""
    settings = ("-".join(f"{key.rpartition('.')[2]}{value}" for key, value in point.items()) for point in points)
    names = [safe_name(f"{sweep}-{text}") for text in settings]
    fit = all(len(name) <= LONGEST_NAME - len("-9999") for name in names) and len(set(names)) == len(names)
    return names if fit else [valid_job_name(f"{sweep[:80]}-{number}") for number in range(1, len(points) + 1)]


def _settings_text(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


# --- results


def results_of(sweep: JobSweep) -> list[JobResult]:
    """Return the result of every job of a sweep so far."""
    queue, known = Queue().read(), known_runs()
    return [_result(job, queue.find(job.entry), _run_of(sweep, job, known)) for job in sweep.jobs]


def _run_of(sweep: JobSweep, job: SweepJob, known: Sequence[Path]) -> RunDirectory | None:
    """Return a job's run without its queue entry, which the queue removes a day after it has ended."""
    # The folder has another name, such as "style-rank8-2", if that of the job was taken.
    pattern = re.compile(rf"{re.escape(safe_name(job.name, 'run'))}(-\d+)?")
    for path in known:
        if path.parent == Path(sweep.runs) and pattern.fullmatch(path.name):
            run = RunDirectory(path)
            with contextlib.suppress(RunError):  # a damaged run has no results to show
                started = next((attempt.get("started") for attempt in run.attempts()), None)
                if isinstance(started, float) and started >= sweep.created:
                    return run
    return None


def _result(job: SweepJob, entry: Entry | None, found: RunDirectory | None) -> JobResult:
    run = RunDirectory(entry.run) if entry and entry.run else found
    state = entry.state if entry else run.state() if run else "removed"
    measured = measurements(events.read_events(run.events)[0]) if run else {}
    where = str(run.path) if run else None
    return JobResult(job.name, job.settings, state, entry.problem if entry else "", run=where, **measured)


def measurements(written: Sequence[events.Event]) -> dict[str, Any]:
    """Return those fields of a JobResult that a run's events determine."""
    progress = RunProgress()
    for event in written:
        progress.update(event)
    validations = [
        event for event in written if isinstance(event, events.Validation) and event.step > 0 and event.loss is not None
    ]
    best = min(validations, key=lambda event: event.loss or 0.0, default=None)
    key = "validation_loss" if best and best.held_out else "loss_on_training_images"
    return {
        "step": progress.step.step if progress.step else 0,
        **({key: best.loss, "best_step": best.step} if best else {}),
        "mean_loss": progress.loss,
        "seconds": _seconds(written),
        "peak_memory": _peak_memory(written),
    }


def _seconds(written: Sequence[events.Event]) -> float | None:
    """Return the seconds of all attempts, without the pauses between them."""
    spans = list(events.attempt_seconds(event for event in written if event.attempt))
    return sum(spans) if spans else None


def _peak_memory(written: Sequence[events.Event]) -> int | None:
    kinds = (events.StepEvent, events.MemorySample, events.PhaseMemory)
    reserved = [event.reserved for event in written if isinstance(event, kinds) and event.reserved is not None]
    host = [event.host for event in written if isinstance(event, events.PhaseMemory) and event.host is not None]
    return max(reserved or host, default=None)


def table(results: Sequence[JobResult]) -> list[str]:
    """Return the table of results, with a column for each swept key and each loss that any run measured."""
    keys = list(results[0].settings)
    held_out = any(result.validation_loss is not None for result in results)
    on_training = any(result.loss_on_training_images is not None for result in results)
    header = [key.removeprefix("recipe.").upper() for key in keys] + ["STATE", "STEP"]
    header += ["VALIDATION LOSS"] * held_out + ["LOSS ON TRAINING IMAGES"] * on_training
    header += ["TRAINING LOSS", "TIME", "PEAK MEMORY", "REMARK"]
    rows = []
    for result in results:
        losses = [result.validation_loss] * held_out + [result.loss_on_training_images] * on_training
        rows.append(
            [
                *(result.settings[key] for key in keys),
                result.state,
                f"{result.step:,}",
                *(_loss(loss, result.best_step) for loss in losses),
                _loss(result.mean_loss),
                "" if result.seconds is None else words.duration(result.seconds),
                "" if result.peak_memory is None else words.size(result.peak_memory),
                result.problem,
            ]
        )
    return words.columns([header, *rows])


def _loss(loss: float | None, step: int | None = None) -> str:
    if loss is None:
        return ""
    return f"{loss:.4f}" if step is None else f"{loss:.4f} (step {step:,})"


def _note_comparability(results: Sequence[JobResult]) -> None:
    """Say what the losses mean, and which of the swept settings make them incomparable."""
    changing = [key for key in results[0].settings if key.startswith(_CHANGES_LOSS)]
    if changing:
        note(
            f"The losses of different jobs are not comparable: {', '.join(changing)} changes what they are measured on."
        )
    if weighing := [key for key in results[0].settings if key.startswith(_CHANGES_TRAINING_LOSS)]:
        note(f"The training losses are not comparable: {', '.join(weighing)} changes how they are computed.")
    if any(result.loss_on_training_images is not None for result in results):
        note(
            "The loss on training images is measured with fixed noise on images that the run trains on: it also falls "
            "when a LoRA memorizes them."
        )


# --- the image


def draw_grid(results: Sequence[JobResult], target: Path) -> bool:
    """Write an image (PNG) with a row per job and a column per preview prompt; return whether there are previews.

    Raises RunError if it cannot be written.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows = [(result, _last_previews(result)) for result in results]
    columns = max(len(images) for _, images in rows)
    if not columns:
        return False
    size = (_TITLE + columns * (_CELL + _GAP), _GAP + len(rows) * (_CELL + _GAP))
    grid = Image.new("RGB", size, _PAPER)
    pen, font = ImageDraw.Draw(grid), ImageFont.load_default(15)
    for number, (result, images) in enumerate(rows):
        top = _GAP + number * (_CELL + _GAP)
        lines = [*_setting_lines(result.settings), f"step {result.step:,}", *([] if images else [result.state])]
        pen.multiline_text((_GAP, top), "\n".join(lines), _INK, font)
        for column, image in enumerate(images):
            grid.paste(image, (_TITLE + column * (_CELL + _GAP), top))
    try:
        long_path(target.parent).mkdir(parents=True, exist_ok=True)
        grid.save(long_path(target), format="PNG")
    except OSError as error:
        sentence = f"Could not write the image {target}: {error.strerror or error}."
        raise RunError("sweep.grid", sentence, places.write_remedy(error)) from error
    return True


def _last_previews(result: JobResult) -> list[Image.Image]:
    """Return the previews of a run's last step that has any, in the order of its prompts, as small RGB images."""
    if result.run is None:
        return []
    run = RunDirectory(Path(result.run))
    previews = [one for one in events.read_events(run.events)[0] if isinstance(one, events.Preview)]
    last = max((preview.step for preview in previews), default=0)
    files_of = {preview.index: run.path / preview.file for preview in previews if preview.step == last}
    images = (_thumbnail(file) for _, file in sorted(files_of.items()))
    return [image for image in images if image is not None]


def _thumbnail(path: Path) -> Image.Image | None:
    """Return an image reduced to a cell of the grid; None if the user has deleted or damaged it."""
    from PIL import Image

    try:
        with open_file(path, "image") as file, Image.open(file, formats=("PNG",)) as image:
            small = image.convert("RGB")
    except (OSError, UnusableFileError, Image.DecompressionBombError):
        return None
    small.thumbnail((_CELL, _CELL), Image.Resampling.LANCZOS)
    return small


def _setting_lines(settings: Mapping[str, str]) -> Iterator[str]:
    for key, value in settings.items():
        yield from textwrap.wrap(f"{key.removeprefix('recipe.')} = {value}", 30)


# --- files


def _run_list(options: argparse.Namespace) -> int:
    names = sorted(path.stem for path in long_path(_folder()).glob("*.json"))
    if options.json:
        echo_json({"sweeps": names})
    elif names:
        echo_lines(names)
    else:
        note("There are no sweeps yet. Start one with `python -m trainer sweep job.toml --set recipe.rank=8,16`.")
    return EXIT_DONE


def _folder() -> Path:
    return places.home() / "sweeps"


def _file(name: str) -> Path:
    return _folder() / f"{safe_name(name)}.json"


def _grid_path(sweep: JobSweep) -> str:
    return str(Path(sweep.runs) / f"{safe_name(sweep.name)}-previews.png")


def _read(name: str) -> JobSweep:
    """Return a saved sweep; raises RunError if there is none of this name or its file cannot be used."""
    try:
        return read_record(_file(name), "record", _sweep_from)
    except FileNotFoundError:
        remedy = "`python -m trainer sweep` lists them."
        raise RunError("sweep.unknown", f'There is no sweep called "{name}".', remedy) from None
    except (OSError, UnusableFileError) as error:
        sentence = f"Could not read the sweep {_file(name)}: {reason_of(error)}."
        raise RunError("sweep.damaged", sentence, "`runs` still lists its runs. Delete the file.") from error


def _sweep_from(found: Any) -> JobSweep:
    jobs = tuple(build(SweepJob, job) for job in found["jobs"])
    if not jobs or any(job.settings.keys() != jobs[0].settings.keys() for job in jobs):
        raise ValueError("its jobs do not vary the same settings")
    return build(JobSweep, {**found, "created": moment(found["created"]), "jobs": jobs})
