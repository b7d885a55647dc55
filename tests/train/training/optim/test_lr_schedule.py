"""Schedules: diffusers' own where it has the same curve, a float64 formula elsewhere."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from diffusers.optimization import (
    get_piecewise_constant_schedule,
    get_polynomial_decay_schedule_with_warmup,
    get_scheduler,
)
from pydantic import ValidationError

from trainer.config.lr_schedule import multiplier, warmup_steps
from trainer.config.recipe import ScheduleConfig

STEPS = 200


def diffusers_curve(name: str, warmup: int, **arguments: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if name == "polynomial":
        scheduler = get_polynomial_decay_schedule_with_warmup(optimizer, warmup, STEPS, **arguments)
    else:
        scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=STEPS, **arguments)
    return [scheduler.lr_lambdas[0](step) for step in range(STEPS + 1)]


def our_curve(**schedule: object) -> list[float]:
    at = multiplier(ScheduleConfig(**schedule), STEPS)
    return [at(step) for step in range(STEPS + 1)]


@pytest.mark.parametrize("warmup", [0, 1, 30])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"kind": "constant"}, {"name": "constant_with_warmup"}),
        ({"kind": "linear"}, {"name": "linear"}),
        ({"kind": "cosine"}, {"name": "cosine"}),
        ({"kind": "restarts", "cycles": 1}, {"name": "cosine_with_restarts", "num_cycles": 1}),
        ({"kind": "restarts", "cycles": 3}, {"name": "cosine_with_restarts", "num_cycles": 3}),
        ({"kind": "polynomial", "power": 2.5}, {"name": "polynomial", "power": 2.5, "lr_end": 0.0}),
        ({"kind": "polynomial", "power": 1.5, "end": 0.2}, {"name": "polynomial", "power": 1.5, "lr_end": 0.2}),
        ({"kind": "linear", "end": 0.3}, {"name": "polynomial", "power": 1.0, "lr_end": 0.3}),
    ],
    ids=str,
)
def test_curve_is_that_of_diffusers(warmup: int, ours: dict[str, object], theirs: dict[str, object]) -> None:
    assert our_curve(warmup=warmup, **ours) == pytest.approx(diffusers_curve(warmup=warmup, **theirs), abs=1e-12)


SPECIAL = {
    "inverse square root": (
        {"kind": "inverse_sqrt"},
        lambda optimizer, warmup: transformers.get_inverse_sqrt_schedule(optimizer, warmup),
    ),
    "inverse square root with a timescale": (
        {"kind": "inverse_sqrt", "timescale": 40},
        lambda optimizer, warmup: transformers.get_inverse_sqrt_schedule(optimizer, warmup, timescale=40),
    ),
    **{
        f"stable, then {shape}": (
            {"kind": "warmup_stable_decay", "decay": 50, "decay_type": shape},
            lambda optimizer, warmup, shape=shape: transformers.get_wsd_schedule(
                optimizer, warmup, 50, num_training_steps=STEPS, decay_type=shape
            ),
        )
        for shape in ("cosine", "linear", "1-sqrt")
    },
    "stable, then a tenth": (
        {"kind": "warmup_stable_decay"},
        lambda optimizer, warmup: transformers.get_wsd_schedule(optimizer, warmup, 20, num_training_steps=STEPS),
    ),
    "cosine to a minimum": (
        {"kind": "cosine", "end": 0.1},
        lambda optimizer, warmup: transformers.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, STEPS, min_lr_rate=0.1
        ),
    ),
}


@pytest.mark.parametrize("warmup", [0, 1, 30])
@pytest.mark.parametrize(("ours", "theirs"), SPECIAL.values(), ids=SPECIAL.keys())
def test_curve_is_that_of_transformers(warmup: int, ours: dict[str, object], theirs: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    at = theirs(optimizer, warmup).lr_lambdas[0]
    expected = [at(step) for step in range(STEPS + 1)]
    assert our_curve(warmup=warmup, **ours) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rules", ["1:50,0.1:120,0.01", "0.5", "1:0.25,0.1:0.6,0.01"])
def test_pieces_are_those_of_diffusers(rules: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    at = get_piecewise_constant_schedule(optimizer, rules.replace("0.25", "50").replace("0.6", "120")).lr_lambdas[0]
    expected = [at(step) for step in range(STEPS + 1)]
    assert our_curve(kind="piecewise", step_rules=rules) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "rules",
    [None, "", "1:50", "1:50,0.1:40,0.01", "a:1,1", "1:0,1", "1:inf,1", "nan", "1:2:3,1", "1:0.5,0.1:2,1", "1:1.5,1"],
)
def test_wrong_pieces_are_refused(rules: str | None) -> None:
    with pytest.raises(ValidationError, match="step_rules"):  # also in words about the kind, which needs them
        ScheduleConfig(kind="piecewise", step_rules=rules)


@pytest.mark.parametrize("kind", ["inverse_sqrt", "warmup_stable_decay"])
def test_floors_of_later_kinds_are_their_formula(kind: str) -> None:
    plain = np.array(our_curve(kind=kind, warmup=20, timescale=7))
    floored = np.where(np.arange(STEPS + 1) < 20, plain, 0.3 + 0.7 * plain)
    assert our_curve(kind=kind, warmup=20, timescale=7, end=0.3) == pytest.approx(floored, abs=1e-12)


def test_rex_and_floors_are_their_formulas() -> None:
    progress = np.clip((np.arange(STEPS + 1) - 20) / (STEPS - 20), 0.0, 1.0)
    warm = np.arange(STEPS + 1) / 20
    rex = np.where(warm < 1.0, warm, (1.0 - progress) / (0.5 + 0.5 * (1.0 - progress)))
    assert our_curve(kind="rex", warmup=20) == pytest.approx(rex, abs=1e-12)
    floored = np.where(warm < 1.0, warm, 0.2 + 0.8 * rex)
    assert our_curve(kind="rex", warmup=20, end=0.2) == pytest.approx(floored, abs=1e-12)
    cosine = np.where(warm < 1.0, warm, 0.1 + 0.9 * (1.0 + np.cos(np.pi * progress)) / 2.0)
    assert our_curve(kind="cosine", warmup=20, end=0.1) == pytest.approx(cosine, abs=1e-12)
    sawtooth = 0.1 + 0.9 * (1.0 + np.cos(np.pi * (2.0 * progress % 1.0))) / 2.0
    expected = np.where(warm < 1.0, warm, np.where(progress == 1.0, 0.1, sawtooth))
    assert our_curve(kind="restarts", cycles=2, warmup=20, end=0.1) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (0.05, 10), (0.29, 58), (7, 7), (1, 1), (0.001, 0)])
def test_warmup_is_steps_or_a_share(warmup: float, steps: int) -> None:
    assert warmup_steps(ScheduleConfig(warmup=warmup), STEPS) == steps


@pytest.mark.parametrize(
    "kind", ["constant", "linear", "cosine", "restarts", "polynomial", "rex", "warmup_stable_decay"]
)
def test_every_curve_stays_where_it_ended(kind: str) -> None:
    at = multiplier(ScheduleConfig(kind=kind, end=0.25), STEPS)
    last = 1.0 if kind == "constant" else 0.25
    assert [at(STEPS), at(STEPS + 1), at(10 * STEPS)] == [last] * 3


def test_warmup_may_fill_the_whole_run() -> None:
    at = multiplier(ScheduleConfig(kind="linear", warmup=STEPS), STEPS)
    assert [at(0), at(50), at(STEPS - 1)] == [0.0, 0.25, 0.995]


@pytest.mark.parametrize(("warmup", "decay", "steps"), [(0, 1000, 20), (100, 1000, 500), (0.5, 0.9, 20)])
def test_a_decay_that_is_too_long_begins_after_the_warmup(warmup: float, decay: float, steps: int) -> None:
    schedule = ScheduleConfig.model_validate({"kind": "warmup_stable_decay", "warmup": warmup, "decay": decay})
    at, first = multiplier(schedule, steps), warmup_steps(schedule, steps)
    factors = [at(step) for step in range(steps)]
    assert factors[first] == 1.0
    assert max(abs(a - b) for a, b in pairwise(factors)) < 0.2
