"""Starts and resumes runs: job file to frozen run directory, run directory to finished LoRA."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from trainer.base.source import BaseSource, open_base
from trainer.config.effectless import effectless
from trainer.config.identity import differences, identity
from trainer.config.job import Job
from trainer.config.length import resolve_length
from trainer.config.load import load_job
from trainer.config.resolve import resolve_job
from trainer.config.write import dump_job
from trainer.dataset.listing import Dataset, read_dataset, read_listing, write_listing
from trainer.dataset.sampling import samples_per_epoch
from trainer.errors import (
    EXIT_DONE,
    EXIT_RESUMABLE,
    DatasetError,
    ImpastoError,
    ResumableError,
    RunError,
)
from trainer.protocol import atomic, events
from trainer.protocol.rundir import RunDirectory, Status
from trainer.training.attempt import Attempt
from trainer.training.control import Control, Interrupted
from trainer.training.machine import numerics, this_machine, versions
from trainer.training.reporter import OnEvent, Reporter
from trainer.training.segments import Segment

Extension = Literal["stretch", "hold", "restart"]


def start(job_path: Path, overrides: Sequence[str], on_event: OnEvent) -> int:
    """Trains the job in ``job_path`` from its beginning; returns the exit code.

    Nothing is written before the job, its base and its dataset are known to be good. Raises ImpastoError.
    """
    job = load_job(job_path, overrides)
    reporter = Reporter(on_event)
    source = open_base(job.base, reporter.phase)
    reporter.notice("base", source.description)
    frozen, dataset = freeze(job, source, reporter)
    run = RunDirectory.create(Path(frozen.output.runs), frozen.name)
    atomic.write_text(run.job, dump_job(frozen, comments=False))
    write_listing(run.listing, dataset.pictures)
    return attempt(run, frozen, source, reporter, [Segment(0, frozen.recipe.steps or 0)])


def freeze(job: Job, source: BaseSource, reporter: Reporter) -> tuple[Job, Dataset]:
    """The job with every value resolved for this base, dataset and machine, and the dataset it will train on."""
    facts: dict[str, Any] = {
        "family": source.family,
        "prediction": source.prediction,
        "zero_terminal_snr": source.zero_terminal_snr,
        "machine": this_machine(job.fit.device),
    }
    # The buckets need a resolved recipe, the length of the run needs the dataset: resolved once for each.
    recipe = resolve_job(job, samples_per_epoch=1, **facts).recipe
    dataset = read_dataset(job.dataset, recipe, lambda done, total: reporter.phase("check", done, total))
    for finding in dataset.findings:
        reporter.notice(finding.code, finding.sentence)
    if not any(picture.kind == "train" for picture in dataset.pictures):
        raise DatasetError(
            "dataset.empty",
            "No picture is left to train on.",
            "Run `python -m trainer check` on the folder: it names what is wrong with each picture.",
        )
    showings = samples_per_epoch(dataset.pictures)
    reporter.notice("length", f"Length: {resolve_length(job.recipe, showings)}.")
    for key, reason in effectless(job, source.family):
        reporter.notice("no_effect", f"{key} has no effect: {reason}.")
    return resolve_job(job, samples_per_epoch=showings, **facts), dataset


def resume(run: RunDirectory, on_event: OnEvent, *, steps: int | None = None, schedule: Extension = "stretch") -> int:
    """Goes on with a run from its last sound checkpoint; returns the exit code.

    ``steps`` gives the run another length. ``schedule`` says what becomes of the learning rate then: "stretch" lays its
    curve over the new length, "hold" keeps its last value, "restart" runs the curve once more over the added steps.
    Raises RunError when job or base are not those the run was started with.
    """
    former = run.attempts()
    if not former:
        raise RunError("run.empty", f"The run {run.name} never started.", "Start its job again with `train`.")
    facts: Mapping[str, Any] = former[-1]
    job = load_job(run.job)
    require_same_job(facts, job)
    segments = [Segment(*pair) for pair in facts["segments"]]
    if steps is not None and steps != job.recipe.steps:
        job, segments = extended(job, steps, schedule, segments)
        atomic.write_text(run.job, dump_job(job, comments=False))
    reporter = Reporter(on_event)
    source = open_base(job.base, reporter.phase)
    require_same_base(facts, source)
    return attempt(run, job, source, reporter, segments)


def require_same_job(facts: Mapping[str, Any], job: Job) -> None:
    """Raises RunError naming every key of the frozen job that decides what is learned and was changed since."""
    changed = differences(facts["job"], frozen_identity(job))
    if changed:
        raise RunError(
            "run.job_changed",
            "The run's frozen job.toml was changed, so going on would not give the same LoRA: " + "; ".join(changed),
            "Put these keys back as they were, or start a new run from the changed job.",
        )


def frozen_identity(job: Job) -> dict[str, object]:
    """What of a frozen job must stay as it is; its length too, which only ``resume --steps`` may change."""
    return identity(job) | {"recipe.steps": job.recipe.steps}


def extended(job: Job, steps: int, schedule: Extension, segments: Sequence[Segment]) -> tuple[Job, list[Segment]]:
    """The job with another length, and the stretches of steps that the schedule's curve is laid over."""
    longer = job.changed(recipe=job.recipe.changed(steps=steps))
    if schedule == "hold":
        return longer, list(segments)
    if schedule == "restart" and steps > segments[-1].last:
        return longer, [*segments, Segment(segments[-1].last, steps)]
    return longer, [Segment(0, steps)]


def require_same_base(facts: Mapping[str, object], source: BaseSource) -> None:
    """Raises RunError when a file of the base is not the one that the run was started with."""
    stated = facts.get("base")
    if stated == source.files:
        return
    former = stated if isinstance(stated, dict) else {}
    changed = sorted(name for name in source.files.keys() | former.keys() if source.files.get(name) != former.get(name))
    raise RunError(
        "run.base_changed",
        f"The base changed since the run started ({', '.join(changed)}), so going on would not give the same LoRA.",
        "Put the base back as it was, or start a new run.",
    )


def attempt(run: RunDirectory, job: Job, source: BaseSource, reporter: Reporter, segments: Sequence[Segment]) -> int:
    """One start of the engine on a frozen run, under its lock; every way out leaves a status and a last event."""
    facts = {
        "job": frozen_identity(job),
        "base": source.files,
        "segments": [[segment.first, segment.last] for segment in segments],
        "device": job.fit.device,
        "threads": job.fit.threads,
        "versions": versions(),
    }
    with run.hold():
        number = run.begin_attempt(facts)
        control = Control(run)
        with events.EventWriter(run.events, number) as writer, control.signals(), numerics(job):
            reporter.writer = writer
            work = Attempt(run, job, read_listing(run.listing), source, reporter, control, segments)
            return conclude(run, job, work, reporter, number)


def conclude(run: RunDirectory, job: Job, work: Attempt, reporter: Reporter, number: int) -> int:
    """Runs the attempt and says how it ended, in the last event, the status and the exit code."""

    def ended(outcome: events.Outcome, file: Path | None = None) -> None:
        step, steps = work.step, job.recipe.steps or 0
        reporter.end_phase()
        reporter.write(events.Finished(outcome=outcome, step=step, file=f"output/{file.name}" if file else None))
        run.write_status(
            Status(phase=None, step=step, steps=steps, heartbeat=time.time(), attempt=number, state=outcome)
        )

    try:
        outcome, file = work.run_to_end(number)
    except (Interrupted, KeyboardInterrupt) as interruption:
        stopped = isinstance(interruption, Interrupted) and interruption.order == "stop"
        outcome, file = ("stopped" if stopped else "paused"), None
    except torch.OutOfMemoryError as error:
        ended("failed")
        raise out_of_memory(reporter, error) from error
    except ImpastoError as error:
        reporter.write(events.ErrorEvent(code=error.code, sentence=error.sentence, remedy=error.remedy))
        ended("paused" if isinstance(error, ResumableError) else "failed")
        raise
    except Exception:
        ended("failed")
        raise
    ended(outcome, file)
    return EXIT_DONE if outcome == "done" else EXIT_RESUMABLE


def out_of_memory(reporter: Reporter, error: torch.OutOfMemoryError) -> ResumableError:
    """Out of memory in words."""
    told = ResumableError(
        "memory.exhausted",
        f"The graphics card ran out of memory: {str(error).splitlines()[0]}",
        'Close other programs that use the card, or set fit.micro_batch = 1 and fit.checkpointing = "full", '
        "then start again; what was trained up to the last checkpoint is kept.",
    )
    reporter.write(events.ErrorEvent(code=told.code, sentence=told.sentence, remedy=told.remedy))
    return told
