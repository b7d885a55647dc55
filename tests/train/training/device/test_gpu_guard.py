"""Wherever memory runs out for good, from the first tensor on, a run ends in words and blames no kernel for it."""

from __future__ import annotations

import pytest
import torch

from tests.support.exhaustion import Exhaustion, SharedPlace, Trial
from trainer.config.job import Job
from trainer.config.load import load_job
from trainer.protocol import events
from trainer.training.acceleration import attention_autotune, int8_autotune
from trainer.training.device.device import choose_attention_kernel
from trainer.training.run.start import PlannedFit

pytestmark = pytest.mark.usefixtures("shared_home")

RACES = (
    "report.previews.prompts=[]",
    "report.validation.every=100",
    "report.validation.timesteps=[500]",
    "recipe.layers=attention",
    "recipe.steps=1",
    "recipe.effective_batch=2",
    "fit.quantize=int8_products",
)


def as_on_a_gpu(job: Job, *_: object) -> PlannedFit:
    """The CPU is always deterministic, and then nothing is timed."""
    return PlannedFit(job.fit.replaced(deterministic=False))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> SharedPlace:
    return SharedPlace(tmp_path_factory.mktemp("shared ü"))


@pytest.fixture(autouse=True)
def races(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's two kernels race as a GPU's would, briefly. The race of layouts, which compiles: test_layout."""
    monkeypatch.setitem(attention_autotune.CANDIDATES, "cpu", ("flash", "math"))
    for race in (attention_autotune, int8_autotune):
        monkeypatch.setattr(race, "SECONDS", 0.002)


def trial_of(place: SharedPlace, exhaustion: Exhaustion) -> Trial:
    trial = Trial(place.job(), RACES, planner=as_on_a_gpu)  # type: ignore[arg-type]
    with exhaustion:
        trial.start()
    return trial


def never(_: events.Event) -> bool:
    return False


def test_memory_that_runs_out_for_good_at_any_allocation_ends_in_words(place: SharedPlace) -> None:
    """While kernels are settled, in each race, and in the run: every allocation from a point on fails."""
    counting = Exhaustion(never, at=-1)
    assert trial_of(place, counting).code == 0
    codes = set()
    for share in (0.0, 0.001, 0.01, 0.3, 0.6):
        at = 1 + int(share * counting.count)
        trial = trial_of(place, Exhaustion(never, at, times=1 << 30, later=1))
        assert trial.error is not None, f"allocation {at} of {counting.count}: ended with {trial.code}"
        codes.add((trial.error.code, trial.error.exit_code))
        assert "kernel" not in trial.error.sentence and "20" in trial.error.sentence
    assert codes == {("memory.full", 2), ("memory.exhausted", 75)}


def test_memory_that_runs_out_once_leaves_no_layer_out(place: SharedPlace) -> None:
    """What every run is to do alike is tried, not timed: a shortage meanwhile must not decide what is learned."""
    settings = [*RACES, "fit.deterministic=true"]
    undisturbed = Trial(place.job(), settings).start()
    disturbed = Trial(place.job(), settings)
    with Exhaustion(never, 1, times=5, operation="aten::_int_mm", later=3):
        disturbed.start()
    products = [load_job(trial.run.job).fit.int8_products for trial in (undisturbed, disturbed)]
    assert products[0] == products[1] and products[0]


def test_a_kernel_that_finds_no_memory_is_not_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", full)
    for choice in ("auto", "flash"):
        with pytest.raises(torch.OutOfMemoryError):
            choose_attention_kernel(choice, torch.device("cpu"), torch.float32, {8})  # type: ignore[arg-type]
