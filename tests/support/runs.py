"""Run directories as an engine leaves them, written with the engine's own classes but without training."""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.config.load import parse_job
from trainer.config.write import dump_job
from trainer.protocol import events, files
from trainer.protocol.events import Event, EventWriter
from trainer.protocol.forecast import Forecast, Peak, PhaseForecast, write_forecast
from trainer.protocol.run_directory import MANIFEST, RunDirectory, Status, folder_name

GIB = 1024**3


def step_event(step: int, steps: int, seed: int = 0, seconds: float = 1.4) -> events.StepEvent:
    """Return one step of a run whose loss falls, with realistic noise."""
    chance = random.Random(seed * 1_000_003 + step)
    fallen = 0.11 + 0.06 * math.exp(-4.0 * step / steps)
    rate = min(1.0, step / (0.05 * steps)) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return events.StepEvent(
        step=step,
        epoch=step // 40,
        loss=fallen * chance.lognormvariate(0.0, 0.28) * (8.0 if chance.random() < 0.004 else 1.0),
        grad_norm=chance.lognormvariate(-1.0, 0.3),
        learning_rates={"unet": 1e-4 * rate, "text_encoder": 5e-5 * rate},
        images=4,
        seconds=seconds * chance.lognormvariate(0.0, 0.06),
        memory=int((7.1 + 0.5 * chance.random()) * GIB),
        reserved=int(7.65 * GIB),
    )


def run_events(steps: int, done: int, seed: int = 0) -> Iterator[Event]:
    """Yield the events of a run of so many steps, up to one of them."""
    yield events.AttemptStarted(pid=1, device="cuda:0", step_seconds=1.5)
    for phase, total in (("load", 1), ("cache_pictures", 40), ("cache_texts", 12)):
        yield events.PhaseStarted(phase=phase, total=total)
        yield events.PhaseProgress(phase=phase, done=total, total=total)
        yield events.PhaseFinished(phase=phase, seconds=3.0)
        yield events.MemorySample(phase=phase, allocated=int(5.1 * GIB), reserved=int(5.3 * GIB))  # type: ignore[arg-type]
    yield events.PhaseStarted(phase="train", total=steps)
    each = max(1, steps // 10)
    for step in range(1, done + 1):
        yield step_event(step, steps, seed)
        if step % each == 0:
            share = step / steps
            held = 0.135 - 0.05 * share + 0.045 * share**2 + 0.0008 * seed
            yield events.Validation(step=step, loss=held, held_out=True, per_timestep={})
            yield events.Preview(step=step, index=0, file=f"samples/{step}.png", seconds=2.0)
            yield events.MemorySample(
                phase="preview", allocated=int((5.9 + 0.2 * share) * GIB), reserved=int(7.7 * GIB)
            )
        if step % (2 * each) == 0:
            yield events.Saved(step=step, file=f"output/test-step{step:06d}.safetensors", sha256="0" * 64)


def write_events(run: RunDirectory, written: Sequence[Event] | Iterator[Event], attempt: int = 1) -> None:
    """Write an engine's events into a run."""
    with EventWriter(run.events, attempt) as writer:
        for event in written:
            writer.write(event)


def write_checkpoint(run: RunDirectory, step: int) -> Path:
    """Write a complete checkpoint without weights, and return its folder."""
    folder = run.checkpoints / folder_name(step)
    folder.mkdir()
    files.write_json(folder / "state.json", {"progress": {"step": step}})
    data = (folder / "state.json").read_bytes()
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    files.write_json(folder / MANIFEST, {"files": {"state.json": facts}})
    return folder


def write_run(
    parent: Path,
    name: str,
    steps: int = 600,
    done: int | None = None,
    state: str = "done",
    seed: int = 0,
    **recipe: object,
) -> RunDirectory:
    """Write a run in a given state; `recipe` values go into its job. A run that is "running" holds no lock."""
    done = steps if done is None else done
    run = RunDirectory.create(parent, name)
    run.begin_attempt({"device": "cuda:0"})
    values = {"steps": steps, "rank": 16, "alpha": 16.0, "learning_rate": 1e-4, **recipe}
    lines = "\n".join(f"{key} = {value!r}" for key, value in values.items())
    text = f"schema = 3\nname = \"{name}\"\n[base]\nmodel = 'base.safetensors'\n"
    text += f"[[dataset.folders]]\npath = 'pictures'\n[recipe]\n{lines}\n"
    run.job.write_text(dump_job(parse_job(text, "job.toml", parent), comments=False), encoding="utf-8")
    write_forecast(run.forecast, forecast(steps))
    write_events(run, run_events(steps, done, seed))
    if state == "done":
        write_events(run, [events.Finished(outcome="done", step=done, file=None)])
    run.write_status(Status(state, "train", done, steps, 1, time.time()))  # type: ignore[arg-type]
    return run


def forecast(steps: int) -> Forecast:
    """Return the forecast of such a run on a GPU with 12 GB."""
    seconds = (
        ("load", 9.0),
        ("cache_pictures", 12.0),
        ("first_step", 1.5),
        ("train", 1.5 * (steps - 1)),
        ("preview", 80.0),
    )
    kinds = {"weights": 4.8, "activations": 2.1, "adapter": 0.2, "gradients": 0.1, "optimizer": 0.2}
    peak = Peak(
        name="backward through the middle block",
        module="unet.mid_block",
        stage="recompute",
        allocated=int(7.4 * GIB),
        by_kind={kind: int(size * GIB) for kind, size in kinds.items()},
        largest=(("unet.up_blocks.0", int(2.4 * GIB)), ("unet.mid_block", GIB), ("", GIB // 8)),
    )
    course = tuple((int(share * 7.4 * GIB), int(7.7 * GIB)) for share in (0.7, 0.8, 1.0, 0.9, 0.7))
    phases = tuple(
        PhaseForecast(phase, int(7.4 * GIB), int(7.7 * GIB), 3 * GIB, each, (peak,), course)  # type: ignore[arg-type]
        for phase, each in seconds
    )
    return Forecast(
        gpu="RTX 3060 12GB",
        phases=phases,
        allocated=int(7.4 * GIB),
        reserved=int(7.7 * GIB),
        outside=GIB // 2,
        margin=GIB // 4,
        budget=int(10.4 * GIB),
        fits=True,
        seconds=sum(each for _, each in seconds),
        step_seconds={"1024x1024": 1.5},
    )
