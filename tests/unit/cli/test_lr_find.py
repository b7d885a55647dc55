"""The range test suggests the rate of the steepest descent, and nothing where the loss does not fall."""

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter1d

from trainer.cli import lr_find
from trainer.config.load import parse_job
from trainer.config.lr_schedule import multiplier
from trainer.errors import JobError, RunError

MINIMAL = 'name = "x"\n[base]\nmodel = "owner/name"\n[[dataset.folders]]\npath = "images"\n'
RATES = list(np.geomspace(1e-6, 1e-2, 100))


def falling(noise: float, seed: int = 0) -> list[float]:
    """Return losses that fall along a logistic curve, steepest at a rate of 1e-4, and then rise."""
    at = np.log10(RATES)
    curve = 1.0 - 0.5 / (1.0 + np.exp(-4.0 * (at + 4.0))) + np.maximum(0.0, at + 3.0) ** 2
    return list(curve + noise * np.random.default_rng(seed).standard_normal(len(RATES)))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_suggestion_is_the_steepest_rate(noise: float) -> None:
    found = lr_find.evaluate(RATES, falling(noise))
    assert found.suggestion is not None
    assert abs(math.log10(found.suggestion) + 4.0) < (0.05 if noise == 0 else 0.4)
    assert 1e-4 < found.lowest < 3e-3
    assert "starting point" in " ".join(lr_find.summary(found))


@pytest.mark.parametrize("steps", [20, 100])
def test_noise_alone_gives_no_suggestion(steps: int) -> None:
    rates = list(np.geomspace(1e-6, 1e-2, steps))
    flat = [list(np.random.default_rng(seed).normal(0.1, 0.02, steps)) for seed in range(40)]
    found = [lr_find.evaluate(rates, losses) for losses in flat]
    assert sum(each.suggestion is not None for each in found) <= 3  # three standard errors of the lowest point
    assert lr_find.summary(next(each for each in found if each.suggestion is None))[0].startswith("No suggestion")


def test_smoothing_is_a_normalized_gaussian_mean() -> None:
    losses = falling(0.1)
    ones = gaussian_filter1d(np.ones(100), 5.0, mode="constant", truncate=30)
    expected = gaussian_filter1d(np.array(losses), 5.0, mode="constant", truncate=30) / ones
    assert lr_find.smoothed(losses, 5.0) == pytest.approx(list(expected), rel=1e-9)


@pytest.mark.parametrize(("steps", "low"), [(100, 99), (100, 60), (20, 19)])
def test_the_noise_is_the_standard_error_of_the_fall(steps: int, low: int) -> None:
    """Compare it with how much the fall to the lowest point of the trend varies between many curves."""
    generator, at = np.random.default_rng(1), np.arange(steps)
    trend = 5.0 - 4.0 * np.minimum(at, low) / low + 4.0 * np.maximum(0, at - low) / steps
    rates = list(np.geomspace(1e-6, 1e-2, steps))
    curves = [lr_find.evaluate(rates, list(trend + generator.normal(0.0, 0.1, steps))) for _ in range(100)]
    falls = [curve.points[0].smoothed - curve.points[low].smoothed for curve in curves]
    straight = lr_find.evaluate(rates, list(trend)).noise  # of the bends of the trend, which are no noise
    noise = np.sqrt(np.mean([curve.noise**2 for curve in curves]) - straight**2)
    assert noise == pytest.approx(np.std(falls), rel=0.25)


def test_a_loss_that_still_falls_at_the_end_asks_for_higher_rates() -> None:
    assert "higher rates make it worse" in lr_find.summary(lr_find.evaluate(RATES, falling(0.0)))[1]
    lines = lr_find.summary(lr_find.evaluate(RATES, list(np.linspace(1.0, 0.5, 100))))
    assert lines[1] == "The loss is lowest at 1.0e-02, the highest rate of the test; try a higher --to."


def test_the_schedule_of_the_test_has_its_rates() -> None:
    settings = ["recipe.learning_rate=2e-4", "recipe.text_encoder.learning_rate=1e-4", "recipe.schedule.warmup=9"]
    job = parse_job(MINIMAL, "job.toml", Path("/jobs"), settings)
    rates = lr_find.ramp(job, 50, 1e-6, 1e-1)
    assert rates == pytest.approx(list(np.geomspace(1e-6, 1e-1, 50)))
    overrides = [*settings, *lr_find._overrides(job, rates, "/it's here")]
    varied = parse_job(MINIMAL, "job.toml", Path("/jobs"), overrides)
    factor = multiplier(varied.recipe.schedule, 50)
    assert [2e-4 * factor(step) for step in range(50)] == pytest.approx(rates, rel=1e-5)
    assert (varied.recipe.steps, varied.output.runs) == (50, "/it's here")


@pytest.mark.parametrize(
    ("settings", "steps", "low", "high", "code"),
    [(["recipe.optimizer.name=prodigy", "recipe.learning_rate=1"], 100, 1e-6, 1e-2, "lr_find.optimizer"),
     (["recipe.optimizer.name=schedulefree"], 100, 1e-6, 1e-2, "lr_find.optimizer"),
     ([], 5, 1e-6, 1e-2, "lr_find.steps"), ([], 100, 1e-2, 1e-6, "lr_find.range"),
     ([], 100, 0.0, 1e-2, "lr_find.range"),
     (["recipe.learning_rate=1e-4"], 100, 1e-6, 1.0, "lr_find.range")],
)  # fmt: skip
def test_a_test_that_cannot_be_run_is_refused(
    settings: list[str], steps: int, low: float, high: float, code: str
) -> None:
    job = parse_job(MINIMAL, "job.toml", Path("/jobs"), settings)
    with pytest.raises(JobError) as caught:
        lr_find.ramp(job, steps, low, high)
    assert caught.value.code == code


def test_a_loss_that_diverges_ends_the_test() -> None:
    losses = [0.1] * 30
    assert not lr_find.has_diverged(losses)
    assert not lr_find.has_diverged([*losses, 1.0])  # a single loss of ten times the usual one is noise
    assert lr_find.has_diverged([*losses, *[1.0] * 5])
    with pytest.raises(RunError, match="diverged after 3 steps"):
        lr_find.evaluate(RATES[:3], losses[:3])


def test_the_chart_marks_the_suggestion(tmp_path: Path) -> None:
    found = lr_find.evaluate(RATES, falling(0.0))
    lr_find.draw(found, tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as image:
        column = 90 + round((math.log10(found.suggestion or 1.0) + 6) / 4 * 870)
        assert {image.getpixel((at, 480)) for at in range(column - 2, column + 3)} & {(0xD5, 0x5E, 0x00)}
    assert len(lr_find.table(found)) == 21
    with pytest.raises(RunError):
        lr_find.draw(found, tmp_path / "missing" / "curve.png")
