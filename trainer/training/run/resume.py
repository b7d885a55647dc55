"""Continue a run from its last sound checkpoint, after checking that nothing it depends on has changed."""

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
from trainer.config.resolve import differences
from trainer.errors import (
    RunError,
)
from trainer.protocol import files
from trainer.protocol.places import cache_limit
from trainer.protocol.reading import read_text
from trainer.protocol.records import build
from trainer.protocol.run_directory import RunDirectory, damaged, newest_step
from trainer.training.data.latent_cache import file_digest
from trainer.training.device.device import this_machine
from trainer.training.optim.lr_schedule import Segment
from trainer.training.reporting.reporter import Learn, OnEvent, Reporter, learn_nothing
from trainer.training.run.start import attempt, frozen_identity

Extension = Literal["stretch", "hold", "restart"]


EXTENSIONS: dict[Extension, str] = {
    "stretch": "The run now has {steps} steps; the learning rate's curve is stretched over all of them.",
    "hold": "The run now has {steps} steps; the learning rate stays at its last value over the added ones.",
    "restart": "The run now has {steps} steps; the learning rate's curve runs once more over the added ones.",
}


def resume(
    run: RunDirectory,
    on_event: OnEvent,
    *,
    steps: int | None = None,
    schedule: Extension = "stretch",
    learn: Learn = learn_nothing,
    made: Callable[[Path], object] = lambda _: None,
) -> int:
    """Goes on with a run from its last sound checkpoint; returns the exit code.

    ``steps`` gives the run another length. ``schedule`` says what becomes of the learning rate then: "stretch" lays its
    curve over the new length, "hold" keeps its last value, "restart" runs the curve once more over the added steps.
    ``made`` gets the run's folder once no other engine can hold it. Raises RunError when job or base are not those the
    run was started with.
    """
    _secure_attempts(run)
    former = run.attempts()
    if not former:
        raise RunError("run.empty", f"The run {run.name} never started.", "Start its job again with `train`.")
    require_history(run, former)
    facts: Mapping[str, Any] = former[-1]
    job = as_last_started(load_job(run.job), former)
    require_same_job(facts, job)
    this_machine(job.fit.device)
    cache_limit()
    segments = [Segment(*pair) for pair in facts["segments"]]
    reporter = Reporter(on_event, learn)
    if steps is not None and steps != job.recipe.steps:
        require_longer(run, steps)
        job, segments = extended(job, steps, schedule, segments)
        reporter.notice("schedule", EXTENSIONS[schedule].format(steps=steps))
    source = open_base(job.base, reporter.phase)
    require_same_base(facts, source)
    require_same_listing(facts, run)
    return attempt(run, job, source, reporter, segments, made)


@dataclass(frozen=True)
class _Start:
    """What run.json must state about each start: a resume compares it, and saving needs it hours later."""

    started: float
    job: Mapping[str, object]
    base: Mapping[str, object]
    listing: str
    segments: tuple[tuple[int, int, bool], ...]


def require_history(run: RunDirectory, former: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError when run.json does not state what continuing the run needs."""
    try:
        for facts in former:
            start = build(_Start, facts)
            if not start.segments or not isinstance(start.job.get("recipe.steps"), int):
                raise ValueError("it does not state the length of the run")
    except (TypeError, ValueError) as error:
        raise damaged(run.run, str(error)) from error


def _secure_attempts(run: RunDirectory) -> None:
    """Take passwords and tokens that an earlier version wrote out of run.json."""
    jobs = [facts.get("job") for facts in run.attempts()]
    links = {str(job["base.model"]) for job in jobs if isinstance(job, dict) and "base.model" in job}
    unsafe = {link: without_secrets(link) for link in links if without_secrets(link) != link}
    if unsafe:
        text = read_text(run.run, "record")
        for link, safe in unsafe.items():
            text = text.replace(json.dumps(link, ensure_ascii=False), json.dumps(safe))
        files.write_text(run.run, text)


def as_last_started(job: Job, former: Sequence[Mapping[str, Any]]) -> Job:
    """The frozen job with the length of the last attempt: a kill may have come between run.json and job.toml."""
    lengths = [facts["job"]["recipe.steps"] for facts in former]
    if job.recipe.steps not in lengths:
        return job
    return job.changed(recipe=job.recipe.changed(steps=lengths[-1]))


def require_longer(run: RunDirectory, steps: int) -> None:
    """Raises RunError when the run has already gone further than ``steps``."""
    done = newest_step(run.checkpoints) or 0
    if steps < done:
        raise RunError(
            "run.shorter",
            f"The run has done {done} steps already, so it cannot end at {steps}.",
            f"Give --steps of {done} or more, or take an earlier LoRA from its output folder.",
        )


def require_same_job(facts: Mapping[str, Any], job: Job) -> None:
    """Raises RunError naming every key of the frozen job that decides what is learned and was changed since."""
    # Only what was stated then: a key that a later version adds has its default, which is what was done before.
    now = {key: value for key, value in frozen_identity(job).items() if key in facts["job"]}
    changed = differences(facts["job"], now)
    if changed:
        raise RunError(
            "run.job_changed",
            "The run's frozen job.toml was changed, so going on would not give the same LoRA: " + "; ".join(changed),
            "Put these keys back as they were, or start a new run from the changed job.",
        )


def extended(job: Job, steps: int, schedule: Extension, segments: Sequence[Segment]) -> tuple[Job, list[Segment]]:
    """The job with another length, and the stretches of steps that the schedule's curve is laid over."""
    longer = job.changed(recipe=job.recipe.changed(steps=steps))
    former = segments[-1].last
    if schedule == "stretch" or steps <= former:
        return longer, [Segment(0, steps)]
    return longer, [*segments, Segment(former, steps, held=schedule == "hold")]


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


def require_same_listing(facts: Mapping[str, Any], run: RunDirectory) -> None:
    """Raises RunError when the frozen listing of pictures and captions was edited."""
    if facts.get("listing") != file_digest(run.listing):
        raise RunError(
            "run.listing_changed",
            f"The run's frozen list of pictures, {run.listing}, was changed, so going on would not give the same LoRA.",
            "Put the file back as it was, or start a new run.",
        )
