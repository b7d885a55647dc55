"""Starts and resumes runs: job file to frozen run directory, run directory to finished LoRA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.base.source import BaseSource, open_base
from trainer.config.checks import doubtful, effectless
from trainer.config.fit import FallbackStep, FitConfig
from trainer.config.job import Job, live_text
from trainer.config.load import load_job
from trainer.config.resolve import Machine, identity, resolve_job, resolve_length
from trainer.config.write import dump_job
from trainer.dataset.dataset import Dataset, read_dataset, read_listing, write_listing
from trainer.dataset.picture import Picture
from trainer.dataset.sampling import samples_per_epoch
from trainer.errors import (
    EXIT_DONE,
    EXIT_RESUMABLE,
    DatasetError,
    ImpastoError,
    ResumableError,
)
from trainer.host import kept_awake, versions
from trainer.protocol import events, files, locks
from trainer.protocol.forecast import Forecast, write_forecast
from trainer.protocol.places import cache_limit, is_disk_full
from trainer.protocol.run_directory import RunDirectory
from trainer.training.acceleration.attention_autotune import race_of
from trainer.training.acceleration.channels_last import layout_of
from trainer.training.acceleration.int8_autotune import products_of
from trainer.training.active_plan import implied_ladder
from trainer.training.build import attach_adapter
from trainer.training.checkpoint import disk_full
from trainer.training.data.latent_cache import file_digest
from trainer.training.device.device import DTYPES, head_widths, numerics, settled, this_machine
from trainer.training.device.out_of_memory import cap_memory, gpu_guard, is_out_of_memory, memory_full
from trainer.training.optim.lr_schedule import Segment
from trainer.training.reporting.reporter import Control, Learn, OnEvent, Reporter, learn_nothing
from trainer.training.run.session import Attempt


@dataclass(frozen=True)
class PlannedFit:
    """How a job is to be fitted to this machine, and what that will take."""

    fit: FitConfig
    ladder: tuple[FallbackStep, ...] | None = None
    """What changes, in order, each time memory runs out; None: whatever the user's keys leave open."""
    forecast: Forecast | None = None
    notices: tuple[str, ...] = ()
    """What the user is told of it, in sentences."""


class Planner(Protocol):
    """Chooses what a job leaves open of its fit, for this machine at this moment."""

    def __call__(
        self, job: Job, written: FitConfig, source: BaseSource, pictures: Sequence[Picture], machine: Machine
    ) -> PlannedFit:
        """``job`` is resolved, its fit from the table; ``written`` holds what the user states of it, which stays.

        Raises ImpastoError when the job cannot be trained here in any way.
        """


def start(
    job_path: Path,
    overrides: Sequence[str],
    on_event: OnEvent,
    planner: Planner | None = None,
    learn: Learn = learn_nothing,
    made: Callable[[Path], object] = lambda _: None,
    text: str | None = None,
) -> int:
    """Trains the job in ``job_path`` from its beginning; returns the exit code.

    Nothing is written before the job, its base and its dataset are known to be good. Without a ``planner`` what the
    fit leaves open is taken from a table. ``learn`` gets the finished run's report, ``made`` the run's folder as soon
    as there is one. ``text`` is the job where it was frozen before: the file is not read then. Raises ImpastoError.
    """
    job = load_job(job_path, overrides, text)
    cache_limit()  # one that is no number is refused now, not in the middle
    with gpu_guard("start training"):
        return _start(job, Reporter(on_event, learn), planner, made)


def _start(job: Job, reporter: Reporter, planner: Planner | None, made: Callable[[Path], object]) -> int:
    source = open_base(job.base, reporter.phase)
    reporter.notice("base", " ".join([f"{source.description}.", *source.evidence]))
    source.require_weights()
    frozen, dataset = freeze(job, source, reporter)
    require_usable_lora(frozen, source)
    cap_memory(torch.device(frozen.fit.device or "cpu"))  # what spills into main memory must not be timed
    planned = PlannedFit(frozen.fit)
    if planner is not None:
        planned = planner(frozen, job.fit, source, dataset.pictures, this_machine(job.fit.device))
    for sentence in planned.notices:
        reporter.notice("plan", sentence)
    frozen = frozen.changed(fit=planned.fit, ladder=settled_ladder(job, planned))
    frozen, told = measured(frozen, job.fit, source, dataset.pictures)
    run = RunDirectory.create(Path(frozen.output.runs), frozen.name)
    made(run.path)
    files.write_text(run.job, dump_job(frozen, comments=False))
    run.write_typed(job.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True))
    write_listing(run.listing, dataset.pictures)
    if planned.forecast is not None:
        write_forecast(run.forecast, planned.forecast)
    return attempt(run, frozen, source, reporter, [Segment(0, frozen.recipe.steps or 0)], told=told)


def measured(
    job: Job, written: FitConfig, source: BaseSource, pictures: Sequence[Picture]
) -> tuple[Job, list[tuple[str, str]]]:
    """The frozen and planned job with what a short measurement chooses, and what to tell of it: codes and sentences."""
    told: list[tuple[str, str]] = []
    if raced := race_of(job, written.attention, source.unet_config, source.text_configs, pictures):
        job = job.changed(fit=job.fit.changed(attention=raced.chosen))
        told.append(("attention", raced.sentence))
    if layout := layout_of(job, source.unet_config, pictures):
        job = job.changed(fit=job.fit.changed(channels_last=layout.pays))
        told.append(("channels_last", layout.sentence))
    if found := products_of(job, source, pictures):
        job = job.changed(fit=job.fit.changed(int8_products=found.products))
        told += [("int8_products", sentence) for sentence in found.sentences]
    return job, told


def settled_ladder(job: Job, planned: PlannedFit) -> tuple[FallbackStep, ...]:
    """The rungs that a run of ``job`` may step down: those that it states itself, else planned ones."""
    if job.ladder:
        return job.ladder
    return tuple(implied_ladder(planned.fit, job.fit)) if planned.ladder is None else planned.ladder


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
    for key, reason in doubtful(job, zero_terminal_snr=source.zero_terminal_snr):
        reporter.notice("doubtful", f"{key}: {reason}.")
    frozen = resolve_job(job, samples_per_epoch=showings, **facts)
    fit = frozen.fit
    widths = head_widths(source.unet_config, source.text_configs)
    with numerics(frozen):  # some kernels are refused where all must be deterministic
        kernel = settled(
            fit.attention or "auto", torch.device(fit.device or "cpu"), DTYPES[fit.dtype or "fp32"], widths
        )
    frozen = frozen.changed(fit=fit.changed(attention=kernel))
    if source.revision:  # a branch may move on; the run stays with the commit it began with
        frozen = frozen.changed(base=frozen.base.changed(revision=source.revision))
    return frozen, dataset


def require_usable_lora(job: Job, source: BaseSource) -> None:
    """Raises LoraFileError when the LoRA to continue from does not fit; it is tried on empty models."""
    if job.base.continue_from:
        encoders = source.empty_text_encoders() if live_text(job) else ()
        attach_adapter(job, source, source.empty_unet(), encoders, torch.float32, fresh=True)


def frozen_identity(job: Job) -> dict[str, object]:
    """What of a frozen job must stay as it is; its length too, which only ``resume --steps`` may change."""
    return identity(job) | {"recipe.steps": job.recipe.steps}


def attempt(
    run: RunDirectory,
    job: Job,
    source: BaseSource,
    reporter: Reporter,
    segments: Sequence[Segment],
    held: Callable[[Path], object] = lambda _: None,
    told: Sequence[tuple[str, str]] = (),
) -> int:
    """One start of the engine on a frozen run, under its lock; every way out leaves a status and a last event.

    ``held`` gets the run's folder as soon as it is locked. ``told`` holds codes and sentences of notices.
    """
    facts = {
        "job": frozen_identity(job),
        "base": source.files,
        "listing": file_digest(run.listing),
        "segments": [[segment.first, segment.last, segment.held] for segment in segments],
        "device": job.fit.device,
        "threads": job.fit.threads,
        "versions": versions(),
    }
    pictures = read_listing(run.listing)
    with run.hold(), locks.marked(locks.lane_of(job.fit.device)), kept_awake(f"Training {run.name}"):
        held(run.path)
        number = run.begin_attempt(facts)
        files.write_text(run.job, dump_job(job, comments=False))
        control = Control(run)
        with events.EventWriter(run.events, number) as writer, control.signals(), numerics(job):
            reporter.writer = writer
            for code, sentence in told:
                reporter.notice(code, sentence)
            work = Attempt(run, job, pictures, source, reporter, control, segments)
            reporter.on_beat = lambda phase: run.write_status(work.status(phase, number, "running"))
            return conclude(run, work, reporter, number)


def conclude(run: RunDirectory, work: Attempt, reporter: Reporter, number: int) -> int:
    """Runs the attempt and says how it ended, in the status, the last event and the exit code."""

    def ended(outcome: events.Outcome, file: Path | None = None, error: ImpastoError | None = None) -> None:
        run.write_status(work.status(None, number, outcome))
        # On a full disk these may not be written; the status above takes the place of what it replaces.
        with suppress(OSError):
            reporter.end_phase()
            if outcome != "failed":
                work.close(outcome)
            if error:
                reporter.write(events.ErrorEvent(code=error.code, sentence=error.sentence, remedy=error.remedy))
            name = f"output/{file.name}" if file else None
            reporter.write(events.Finished(outcome=outcome, step=work.step, file=name, run=run.name))

    try:
        outcome, file = work.run_to_end(number)
    except KeyboardInterrupt:
        outcome, file = "paused", None
    except (ImpastoError, OSError, RuntimeError, MemoryError) as error:
        told = in_words(error, run)
        ended("paused" if isinstance(told, ResumableError) else "failed", error=told)
        if told is None or told is error:
            raise
        raise told from error
    except Exception:
        ended("failed")
        raise
    ended(outcome, file)
    return EXIT_DONE if outcome == "done" else EXIT_RESUMABLE


def in_words(error: Exception, run: RunDirectory) -> ImpastoError | None:
    """The error as a user can act on it; None for a fault of ours."""
    if isinstance(error, ImpastoError):
        return error
    if isinstance(error, OSError):
        return disk_full(run.path, error.strerror or str(error)) if is_disk_full(error) else None
    if not is_out_of_memory(error):
        return None
    full = memory_full(error, "continue training")
    return ResumableError(
        "memory.exhausted", full.sentence, f"{full.remedy} `resume` continues from the last checkpoint."
    )
