"""Plans a run as it starts: what the job leaves open of its fit, for this machine and what is free on it now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.cli import plan_words, words
from trainer.cli.plan import PATIENCE
from trainer.errors import JobError

if TYPE_CHECKING:
    from trainer.base.source import BaseSource
    from trainer.config.fit import FitConfig
    from trainer.config.job import Job
    from trainer.config.resolve import Machine
    from trainer.dataset.picture import Picture
    from trainer.memory.planner.planner import Planned
    from trainer.training.run.start import PlannedFit


def plan_run(
    job: Job, written: FitConfig, source: BaseSource, pictures: Sequence[Picture], machine: Machine
) -> PlannedFit:
    """Return the fit for a resolved job, its ladder and its forecast; see trainer.training.run.start.Planner.

    On the CPU the fit is the table's, and only time and main memory are forecast. Raises JobError when the card is
    clearly too small for the job however it is fitted, RunError when a disk is for what the run writes.
    """
    import torch

    from trainer.config.fit import PLANNED
    from trainer.dataset.cache_keys import Cached
    from trainer.memory.device.device_state import situation_here
    from trainer.memory.forecast.on_cpu import plan_on_cpu
    from trainer.memory.forecast.schedule import occasions_of
    from trainer.memory.planner.planner import plan
    from trainer.memory.planner.request import require_room
    from trainer.memory.trace.library import Traces
    from trainer.memory.trace.store import TapeStore
    from trainer.memory.trace.workload import subject_of_job
    from trainer.protocol.places import cache_folder
    from trainer.training.acceleration.throughput import measure_rate
    from trainer.training.device.device import card_of, numerics, own_bytes
    from trainer.training.run.start import PlannedFit

    traces = Traces(TapeStore.of_user())
    cached = Cached(cache_folder(), job, source.family, source.vae_hash, source.text_hash)
    subject, occasions = subject_of_job(job, source, pictures), occasions_of(job, source, pictures, cached)
    require_room(job, subject, occasions)
    if machine.device == "cpu":
        planned = plan_on_cpu(job, subject, occasions, traces)
        assert planned.pick is not None  # nothing limits main memory in a forecast
        forecast = planned.pick.forecast
        return PlannedFit(job.fit, forecast=forecast, notices=(plan_words.on_cpu(forecast),))
    device = torch.device(machine.device)
    card = card_of(device.index or 0)
    deterministic = bool(job.fit.deterministic)
    own = own_bytes(card, device.index or 0)
    situation_here(card, deterministic=deterministic, own=own).require_budget()  # a full GPU cannot be timed either
    with numerics(job):  # PyTorch keeps the workspace that is stated when it first multiplies matrices
        rate = measure_rate(device, name=card.name)
    situation = situation_here(card, rate=rate, deterministic=deterministic, own=own)
    # Flash and efficient attention take the same at the peak, so both are planned by flash's tapes, which are shared.
    stated = written.changed(attention=written.attention or ("math" if job.fit.attention == "math" else "auto"))
    until = time.monotonic() + PATIENCE
    with traces.helped():
        planned = plan(subject, stated, situation, traces, occasions, until=until, others=False)
        if planned.pick is None and planned.missing > situation.margin:
            raise _too_large(plan(subject, stated, situation, traces, occasions, until=until), job, written)
    chosen = planned.pick or planned.smaller
    assert chosen is not None  # where nothing fits there is the smallest
    fit = job.fit.changed(**{name: getattr(chosen.fit, name) for name in PLANNED})
    ladder = planned.ladder if planned.pick else None
    return PlannedFit(fit, ladder, chosen.forecast, tuple(_notices(planned, job)))


def _notices(planned: Planned, job: Job) -> Sequence[str]:
    chosen, batch = planned.pick or planned.smaller, job.recipe.effective_batch
    assert chosen is not None
    notices = [f"Planned for {planned.situation.card.name}: {plan_words.sentence(chosen, batch)}"]
    if planned.pick is None:
        notices.append(
            f"This is {words.size(planned.missing)} more than can be relied on, so it may not fit. It is tried all the "
            "same; if memory runs out, the run says so and keeps what it has."
        )
    if not planned.complete:
        notices.append("Not every fit was looked at for want of time; `python -m trainer plan JOB` looks at more.")
    if planned.situation.correction.damage:
        notices.append(planned.situation.correction.damage)
    return notices


def _too_large(planned: Planned, job: Job, written: FitConfig) -> JobError:
    batch = job.recipe.effective_batch
    remedy = plan_words.what_would(planned.lighter, planned.situation, planned.missing, batch)
    return JobError("plan.nothing_fits", f"{job.name}: {plan_words.nothing_fits(planned, written)}", remedy)
