"""Continuing a run from its newest undamaged checkpoint, if nothing it depends on has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.base.source import BaseSource, open_base
from trainer.config.credentials import without_secrets
from trainer.config.job import Job
from trainer.config.load import load_job
from trainer.config.lr_schedule import Segment
from trainer.config.resolve import differences
from trainer.errors import (
    RunError,
)
from trainer.protocol import files
from trainer.protocol.places import cache_limit
from trainer.protocol.reading import read_text
from trainer.protocol.records import build, renamed_flat
from trainer.protocol.run_directory import RunDirectory, damaged, newest_step
from trainer.training.data.latent_cache import file_digest
from trainer.training.device.device import this_machine
from trainer.training.reporting.reporter import Learn, OnEvent, Reporter, learn_nothing
from trainer.training.run.start import attempt, frozen_identity

Extension = Literal["stretch", "hold", "restart"]


EXTENSIONS: dict[Extension, str] = {
    "stretch": "The run now has {steps} steps. The learning rate schedule is stretched over all of them.",
    "hold": "The run now has {steps} steps. The learning rate keeps its last value for the added steps.",
    "restart": "The run now has {steps} steps. The learning rate schedule restarts for the added steps.",
}


def resume(
    run: RunDirectory,
    on_event: OnEvent,
    *,
    steps: int | None = None,
    schedule: Extension = "stretch",
    learn: Learn = learn_nothing,
    made: Callable[[Path], object] = lambda _: None,
    memory_snapshot: bool = False,
) -> int:
    """Continue a run from its newest undamaged checkpoint and return the exit code.

    ``steps`` sets a new total number of steps and turns off early stopping. ``schedule`` determines the learning rate
    in that case: "stretch" spreads its curve over the new length, "hold" keeps its last value, "restart" repeats the
    curve over the added steps. ``made`` is called with the run's folder as soon as this process holds its lock.
    ``memory_snapshot`` records the GPU memory for PyTorch's viewer. Raises RunError if the job, the base or the listing
    has changed since the run started.
    """
    _secure_attempts(run)
    attempts = run.attempts()
    if not attempts:
        raise RunError(
            "run.empty", f"Could not resume {run.name}: it never started.", "Start its job again with `train`."
        )
    require_history(run, attempts)
    facts: Mapping[str, Any] = attempts[-1]
    job = as_last_started(load_job(run.job), attempts)
    require_same_job(facts, job)
    this_machine(job.fit.device)
    cache_limit()
    segments = [Segment(*pair) for pair in facts["segments"]]
    reporter = Reporter(on_event, learn)
    if steps is not None and steps != job.recipe.steps:
        require_longer(run, steps)
        job, segments = extended(job, steps, schedule, segments)
        reporter.notice("schedule", EXTENSIONS[schedule].format(steps=steps))
    if steps is not None and job.report.validation.patience is not None:
        endless = job.report.validation.replaced(patience=None)
        job = job.replaced(report=job.report.replaced(validation=endless))
        reporter.notice("early_stopping", "Early stopping is off from now on: --steps sets the number of steps.")
    source = open_base(job.base, reporter.phase)
    require_same_base(facts, source)
    require_same_listing(facts, run)
    return attempt(run, job, source, reporter, segments, made, memory_snapshot=memory_snapshot)


@dataclass(frozen=True)
class _Start:
    """Facts that run.json must contain about each start; resuming compares them, and exporting the LoRA needs them."""

    started: float
    job: Mapping[str, object]
    base: Mapping[str, object]
    listing: str
    segments: tuple[tuple[int, int, bool], ...]


def require_history(run: RunDirectory, attempts: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError if run.json does not contain everything needed to continue the run."""
    try:
        for facts in attempts:
            start = build(_Start, facts)
            if not start.segments or not isinstance(start.job.get("recipe.steps"), int):
                raise ValueError("it does not state the length of the run")
    except (TypeError, ValueError) as error:
        raise damaged(run.run, str(error)) from error


def _secure_attempts(run: RunDirectory) -> None:
    """Remove passwords and tokens that an earlier version wrote to run.json."""
    jobs = [facts.get("job") for facts in run.attempts()]
    links = {str(job["base.model"]) for job in jobs if isinstance(job, dict) and "base.model" in job}
    unsafe = {link: without_secrets(link) for link in links if without_secrets(link) != link}
    if unsafe:
        text = read_text(run.run, "record")
        for link, safe in unsafe.items():
            text = text.replace(json.dumps(link, ensure_ascii=False), json.dumps(safe))
        files.write_text(run.run, text)


def as_last_started(job: Job, attempts: Sequence[Mapping[str, Any]]) -> Job:
    """Return the frozen job with the number of steps that the last attempt had.

    job.toml has a different number if the process was killed between writing run.json and job.toml.
    """
    lengths = [facts["job"]["recipe.steps"] for facts in attempts]
    if job.recipe.steps not in lengths:
        return job
    return job.replaced(recipe=job.recipe.replaced(steps=lengths[-1]))


def require_longer(run: RunDirectory, steps: int) -> None:
    """Raise RunError if the run has already done more than ``steps`` steps."""
    done = newest_step(run.checkpoints) or 0
    if steps < done:
        raise RunError(
            "run.shorter",
            f"Could not shorten the run to {steps} steps: it has already done {done}.",
            f"Set --steps to {done} or more, or use an earlier LoRA from its output folder.",
        )


def require_same_job(facts: Mapping[str, Any], job: Job) -> None:
    """Raise RunError if any key that affects the result was changed in the frozen job; the error lists them."""
    # Compare only keys recorded then. A key added since has its default, which is what earlier versions did.
    then = renamed_flat(facts["job"])
    now = {key: value for key, value in frozen_identity(job).items() if key in then}
    changed = differences(then, now)
    if changed:
        raise RunError(
            "run.job_changed",
            f"Could not resume: the run's frozen job.toml was changed ({'; '.join(changed)}), so the LoRA would not be "
            "the same.",
            "Restore these keys, or start a new run from the changed job.",
        )


def extended(job: Job, steps: int, schedule: Extension, segments: Sequence[Segment]) -> tuple[Job, list[Segment]]:
    """Return the job with a new number of steps, and the segments that the schedule runs over."""
    longer = job.replaced(recipe=job.recipe.replaced(steps=steps))
    old_end = segments[-1].last
    if schedule == "stretch" or steps <= old_end:
        return longer, [Segment(0, steps)]
    return longer, [*segments, Segment(old_end, steps, held=schedule == "hold")]


def require_same_base(facts: Mapping[str, object], source: BaseSource) -> None:
    """Raise RunError if a file of the base has changed since the run started."""
    stated = facts.get("base")
    if stated == source.files:
        return
    recorded = stated if isinstance(stated, dict) else {}
    names = source.files.keys() | recorded.keys()
    changed = sorted(name for name in names if source.files.get(name) != recorded.get(name))
    raise RunError(
        "run.base_changed",
        f"Could not resume: the base has changed since the run started ({', '.join(changed)}), so the LoRA would not "
        "be the same.",
        "Restore the base, or start a new run.",
    )


def require_same_listing(facts: Mapping[str, Any], run: RunDirectory) -> None:
    """Raise RunError if the frozen listing of images and captions has changed."""
    if facts.get("listing") != file_digest(run.listing):
        raise RunError(
            "run.listing_changed",
            f"Could not resume: the run's frozen list of images, {run.listing}, was changed, so the LoRA would not "
            "be the same.",
            "Restore the file, or start a new run.",
        )
