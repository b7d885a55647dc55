"""Starting runs: from a job file to a frozen run directory, and from that to the finished LoRA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer.adapter.continuing import layers_of_file
from trainer.adapter.layers import trained_layers
from trainer.adapter.names import slots
from trainer.base.source import BaseSource, open_base
from trainer.config.checks import doubtful, settings_without_effect
from trainer.config.fit import FallbackStep, FitConfig
from trainer.config.job import Job, trains_text_encoder
from trainer.config.load import load_job
from trainer.config.lr_schedule import Segment
from trainer.config.resolve import Machine, identity, resolve_job, resolve_length
from trainer.config.write import dump_job
from trainer.dataset.dataset import Dataset, read_dataset, read_listing, write_listing
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import epoch_samples, samples_per_epoch, usual_shape
from trainer.errors import (
    EXIT_DONE,
    EXIT_RESUMABLE,
    DatasetError,
    ImpastoError,
    ResumableError,
)
from trainer.host import keep_awake, versions
from trainer.protocol import events, files, locks
from trainer.protocol.forecast import Forecast, write_forecast
from trainer.protocol.places import cache_limit, is_disk_full
from trainer.protocol.run_directory import RunDirectory
from trainer.protocol.text import caption_lengths_text
from trainer.training.acceleration.attention_autotune import autotune_attention
from trainer.training.acceleration.channels_last import autotune_layout
from trainer.training.acceleration.int8_autotune import autotune_int8
from trainer.training.active_plan import implied_fallbacks
from trainer.training.build import attach_adapter
from trainer.training.checkpoint import disk_full
from trainer.training.data.latent_cache import file_digest
from trainer.training.device.device import DTYPES, choose_attention_kernel, head_widths, numeric_settings, this_machine
from trainer.training.device.out_of_memory import cap_memory, gpu_guard, is_out_of_memory, oom_error
from trainer.training.reporting.reporter import Control, Learn, OnEvent, Reporter, learn_nothing
from trainer.training.run.session import Attempt


@dataclass(frozen=True)
class PlannedFit:
    """The fit settings chosen for a job on this machine, with their forecast."""

    fit: FitConfig
    fallbacks: tuple[FallbackStep, ...] | None = None
    """Fallback steps, applied in order when memory runs out; None: all steps that change no key set by the user."""
    forecast: Forecast | None = None
    notices: tuple[str, ...] = ()
    """Sentences about the plan for the user."""


class Planner(Protocol):
    """Chooses the fit settings that a job leaves open, for this machine at this moment.

    Implemented above this package, in trainer.cli, with trainer.memory.
    """

    def __call__(
        self, job: Job, written: FitConfig, source: BaseSource, images: Sequence[ImageRecord], machine: Machine
    ) -> PlannedFit:
        """Return the fit settings for a resolved ``job``; keys that the user has ``written`` are not changed.

        Raises ImpastoError if the job cannot be trained on this machine.
        """


def start(
    job_path: Path,
    overrides: Sequence[str],
    on_event: OnEvent,
    planner: Planner | None = None,
    learn: Learn = learn_nothing,
    made: Callable[[Path], object] = lambda _: None,
    text: str | None = None,
    *,
    memory_snapshot: bool = False,
) -> int:
    """Train the job in ``job_path`` from its beginning and return the exit code.

    Nothing is written before the job, its base and its dataset have been checked. Without a ``planner``, fit settings
    that the job leaves open get fixed defaults. ``learn`` is called with the finished run's report, ``made`` with the
    run's folder as soon as it exists. ``text`` replaces the content of the job file, which is then not read.
    ``memory_snapshot`` records the GPU memory for PyTorch's viewer. Raises ImpastoError.
    """
    job = load_job(job_path, overrides, text)
    cache_limit()  # raises now, not hours later, if the limit is not a number
    with gpu_guard("start training"):
        return _start(job, Reporter(on_event, learn), planner, made, memory_snapshot=memory_snapshot)


def _start(
    job: Job, reporter: Reporter, planner: Planner | None, made: Callable[[Path], object], *, memory_snapshot: bool
) -> int:
    source = open_base(job.base, reporter.phase)
    reporter.notice("base", " ".join([f"{source.description}.", *source.evidence]))
    source.require_weights()
    frozen, dataset = freeze(job, source, reporter)
    frozen = with_ranks_of_lora(frozen, source, reporter)
    require_usable_lora(frozen, source)
    cap_memory(torch.device(frozen.fit.device or "cpu"))  # before autotuning, whose timings must not include spilling
    planned = PlannedFit(frozen.fit)
    if planner is not None:
        planned = planner(frozen, job.stated_fit, source, dataset.images, this_machine(job.fit.device))
    for sentence in planned.notices:
        reporter.notice("plan", sentence)
    frozen = frozen.replaced(fit=planned.fit, fallbacks=settled_fallbacks(job, planned))
    frozen, notices = autotuned(frozen, job.fit, source, dataset.images)
    # Nothing has been written until here, so an error above leaves no run behind.
    run = RunDirectory.create(Path(frozen.output.runs), frozen.name)
    made(run.path)
    files.write_text(run.job, dump_job(frozen, comments=False))
    run.write_user_recipe(job.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True))
    write_listing(run.listing, dataset.images)
    if planned.forecast is not None:
        write_forecast(run.forecast, planned.forecast)
    del dataset  # the attempt reads the listing; of large datasets, both together would take hundreds of MB
    whole = [Segment(0, frozen.recipe.steps or 0)]
    return attempt(run, frozen, source, reporter, whole, notices=notices, memory_snapshot=memory_snapshot)


def autotuned(
    job: Job, written: FitConfig, source: BaseSource, images: Sequence[ImageRecord]
) -> tuple[Job, list[tuple[str, str]]]:
    """Return the planned job with settings chosen by short measurements, and (code, sentence) notices."""
    notices: list[tuple[str, str]] = []
    if raced := autotune_attention(job, written.attention, source.unet_config, source.text_configs, images):
        job = job.replaced(fit=job.fit.replaced(attention=raced.chosen))
        notices.append(("attention", raced.sentence))
    if layout := autotune_layout(job, source.unet_config, images):
        job = job.replaced(fit=job.fit.replaced(channels_last=layout.is_faster))
        notices.append(("channels_last", layout.sentence))
    if found := autotune_int8(job, source, images):
        job = job.replaced(fit=job.fit.replaced(int8_products=found.products))
        notices += [("int8_products", sentence) for sentence in found.sentences]
    return job, notices


def settled_fallbacks(job: Job, planned: PlannedFit) -> tuple[FallbackStep, ...]:
    """Return the fallback steps for a run of ``job``: the ones set in the job, else the planned ones."""
    if job.fallbacks:
        return job.fallbacks
    return tuple(implied_fallbacks(planned.fit, job.stated_fit)) if planned.fallbacks is None else planned.fallbacks


def freeze(job: Job, source: BaseSource, reporter: Reporter) -> tuple[Job, Dataset]:
    """Return the job with every value resolved for this base, dataset and machine, and its dataset."""
    facts: dict[str, Any] = {
        "family": source.family,
        "prediction": source.prediction,
        "zero_terminal_snr": source.zero_terminal_snr,
        "machine": this_machine(job.fit.device),
    }
    # Buckets need a resolved recipe, and the run's length needs the dataset, so the job is resolved twice.
    recipe = resolve_job(job, samples_per_epoch=1, **facts).recipe
    # Raises for blocks without effect, before minutes of reading and encoding images.
    trained_layers(slots(source.family, source.unet_config, source.text_configs), recipe)
    as_written = recipe.replaced(images=job.recipe.images)  # limits of buckets follow each folder's resolution
    dataset = read_dataset(job.dataset, as_written, lambda done, total: reporter.phase("check", done, total))
    for finding in dataset.findings:
        reporter.notice(finding.code, finding.sentence)
    if not any(one.kind == "train" for one in dataset.images):
        raise DatasetError(
            "dataset.empty",
            "Could not start training: the dataset has no usable training images.",
            "Run `python -m trainer check` on the folder to see what is wrong with each image.",
        )
    showings = samples_per_epoch(dataset.images)
    reporter.notice("length", f"Length: {resolve_length(job.recipe, showings)}.")
    if recipe.has_caption_lengths:
        lengths = Counter(usual_shape(image, recipe)[2] for image, _ in epoch_samples(dataset.images, 0))
        counts = caption_lengths_text(sorted(lengths.items()))
        reporter.notice("captions", f"Captions are padded to the length that each needs: {counts}.")
    for key, reason in settings_without_effect(job, source.family):
        reporter.notice("no_effect", f"{key} has no effect: {reason}.")
    doubts = doubtful(
        job, zero_terminal_snr=source.zero_terminal_snr, prediction=source.prediction, family=source.family
    )
    for key, reason in doubts:
        reporter.notice("doubtful", f"{key}: {reason}.")
    frozen = resolve_job(job, samples_per_epoch=showings, **facts)
    fit = frozen.fit
    widths = head_widths(source.unet_config, source.text_configs)
    with numeric_settings(frozen):  # deterministic mode refuses some kernels
        kernel = choose_attention_kernel(
            fit.attention or "auto", torch.device(fit.device or "cpu"), DTYPES[fit.dtype or "fp32"], widths
        )
    frozen = frozen.replaced(fit=fit.replaced(attention=kernel))
    if source.revision:  # a branch may get new commits; the run keeps the commit it started with
        frozen = frozen.replaced(base=frozen.base.replaced(revision=source.revision))
    return frozen, dataset


def with_ranks_of_lora(job: Job, source: BaseSource, reporter: Reporter) -> Job:
    """Return the job with the ranks of the LoRA to continue from, if they differ between its layers.

    A resized LoRA and the plain copy of another method have such ranks. Raises LoraFileError and JobError.
    """
    if not job.base.continue_from:
        return job
    table = slots(source.family, source.unet_config, source.text_configs)
    entries = layers_of_file(Path(job.base.continue_from), job.recipe, source.family, table)
    if not entries:
        return job
    ranks = [entry.rank for entry in entries if entry.rank is not None]
    reporter.notice(
        "ranks",
        f"{len(entries)} layers of {Path(job.base.continue_from).name} have other ranks than the recipe's: "
        f"{min(ranks)} to {max(ranks)}. They are trained with the file's ranks and the recipe's alpha / rank.",
    )
    return job.replaced(recipe=job.recipe.replaced(blocks=(*(job.recipe.blocks or ()), *entries)))


def require_usable_lora(job: Job, source: BaseSource) -> None:
    """Raise LoraFileError if the LoRA to continue from does not match; checked on models without weights."""
    if job.base.continue_from:
        encoders = source.empty_text_encoders() if trains_text_encoder(job) else ()
        attach_adapter(job, source, source.empty_unet(), encoders, torch.float32, fresh=True)


def frozen_identity(job: Job) -> dict[str, object]:
    """Return the frozen job's values that must not change; ``recipe.steps`` may, but only by ``resume --steps``."""
    return identity(job) | {"recipe.steps": job.recipe.steps}


def attempt(
    run: RunDirectory,
    job: Job,
    source: BaseSource,
    reporter: Reporter,
    segments: Sequence[Segment],
    held: Callable[[Path], object] = lambda _: None,
    notices: Sequence[tuple[str, str]] = (),
    *,
    memory_snapshot: bool = False,
) -> int:
    """Run one attempt at a frozen run under its lock and return the exit code.

    However the attempt ends, it writes a final status and a last event. ``held`` is called with the run's folder as
    soon as it is locked. ``notices`` are (code, sentence) pairs to report. With
    ``memory_snapshot``, GPU memory is recorded for PyTorch's viewer.
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
    images = read_listing(run.listing)
    # The device's lock is optional: an engine of the queue holds it already, and users may train two runs on one GPU.
    with run.hold(), locks.try_hold_lane(locks.lane_of(job.fit.device)), keep_awake(f"Training {run.name}"):
        held(run.path)
        number = run.begin_attempt(facts)
        files.write_text(run.job, dump_job(job, comments=False))
        control = Control(run)
        with events.EventWriter(run.events, number) as writer, control.signals(), numeric_settings(job):
            reporter.write_to(writer)
            for code, sentence in notices:
                reporter.notice(code, sentence)
            work = Attempt(run, job, images, source, reporter, control, segments, memory_snapshot=memory_snapshot)
            reporter.send_heartbeats(lambda phase: run.write_status(work.status(phase, number, "running")))
            with closing(work.manager.loader):
                return conclude(run, work, reporter, number)


def conclude(run: RunDirectory, work: Attempt, reporter: Reporter, number: int) -> int:
    """Run the attempt, record how it ended in the status and the last event, and return the exit code."""

    def ended(outcome: events.Outcome, file: Path | None = None, error: ImpastoError | None = None) -> None:
        run.write_status(work.status(None, number, outcome))
        # These may fail on a full disk. The status above replaces a file of about the same size, so it usually fits.
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
        reported = as_user_error(error, run)
        ended("paused" if isinstance(reported, ResumableError) else "failed", error=reported)
        if reported is None or reported is error:
            raise
        raise reported from error
    except Exception:
        ended("failed")
        raise
    ended(outcome, file)
    return EXIT_DONE if outcome == "done" else EXIT_RESUMABLE


def as_user_error(error: Exception, run: RunDirectory) -> ImpastoError | None:
    """Return an error that a user can act on in place of ``error``, or None if it is a bug in the program."""
    if isinstance(error, ImpastoError):
        return error
    if isinstance(error, OSError):
        return disk_full(run.path, error.strerror or str(error)) if is_disk_full(error) else None
    if not is_out_of_memory(error):
        return None
    full = oom_error(error, "continue training")
    return ResumableError(
        "memory.exhausted", full.sentence, f"{full.remedy} `resume` continues from the last checkpoint."
    )
