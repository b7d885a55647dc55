"""Memory runs out in real runs, in any phase and at any allocation of a step; the LoRA is the one it should be."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.exhaustion import (
    Counter,
    Exhaustion,
    Killed,
    SharedPlace,
    Trial,
    Wanted,
    allocates,
    edit,
    phase_begins,
    run_with_changes,
    step_begins,
    step_ends,
)
from tests.support.sample import of_the_day
from trainer.config.fit import FitConfig
from trainer.config.job import Job
from trainer.errors import ResumableError
from trainer.protocol import commands, events
from trainer.protocol.forecast import Forecast
from trainer.protocol.report import read_report
from trainer.training.engine import Engine
from trainer.training.recovery.engine_manager import EngineManager
from trainer.training.recovery.recovery import remedy
from trainer.training.run.start import PlannedFit

pytestmark = pytest.mark.usefixtures("shared_home")

FULL = {"gradient_checkpointing": "full"}
ONE = {"micro_batch": 1}
LADDER = 'fallbacks=[{exact=true, gradient_checkpointing="full"}, {exact=false, micro_batch=1}]'
# Four steps, a checkpoint after the second: what the optimizer tears in the last step is replayed from there.
TRAIN_ONLY = (
    "report.previews.prompts=[]",
    "report.validation.every=100",
    "report.validation.timesteps=[500]",
    "report.saving.every_steps=100",
    "report.saving.checkpoint_every=2",
    "recipe.layers=attention",
    "recipe.steps=4",
    LADDER,
)


# A disk limit of one epoch makes a shard of each: there are two, and nothing is loaded before the first.
PORTIONS = (*TRAIN_ONLY, "recipe.images.crop=random", "fit.cache_gigabytes=8e-5")


class Place(SharedPlace):
    """With what undisturbed runs allocate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.counted: dict[object, Counter] = {}

    def truth(
        self, family: str, settings: Sequence[str], changes: Sequence[tuple[int, Mapping[str, Any]]] = ()
    ) -> tuple[str, dict[str, str]]:
        """The LoRA of a run to which nothing happens, told in advance when its fit changes."""
        key = (family, tuple(settings), repr(changes))
        if key not in self.known:
            self.known[key] = run_with_changes(self.job(family), settings, changes).lora()
        return self.known[key]

    def size(self, settings: Sequence[str]) -> Counter:
        """What the last step of an undisturbed run allocates; the run is kept for comparison."""
        key = ("sd15", tuple(settings), "()")
        if key not in self.counted:
            self.counted[key] = counter = Counter(step_begins(4), step_ends(4))
            self.known[key] = Trial(self.job(), settings, counter.tell).start().lora()
        return self.counted[key]

    def exhausted(self, family: str, settings: Sequence[str], exhaustion: Exhaustion) -> Trial:
        trial = Trial(self.job(family), settings, exhaustion.tell).start()
        assert not exhaustion.left, "it was never asked for so many allocations"
        return trial


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("shared ü"))


def changes_of(trial: Trial) -> list[tuple[int, Mapping[str, Any]]]:
    return [(event.step, event.changes) for event in trial.of(events.SteppedDown)]


def assert_right(place: Place, family: str, settings: Sequence[str], trial: Trial) -> None:
    """Require the LoRA of the undisturbed run, or of a run with the same changes where one of them is not exact."""
    assert trial.code == 0
    exact = all(event.exact for event in trial.of(events.SteppedDown))
    assert trial.lora() == place.truth(family, settings, () if exact else changes_of(trial))
    steps = [event.step for event in trial.of(events.StepEvent)]
    assert steps == [1, 2, 3, 4], "a step was left out or told twice"


# --- any allocation of a step ---------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": (),
    "adamw8bit": ("recipe.rank=64",),  # tensors of 4096 elements, from which bitsandbytes keeps 8-bit state
    "prodigy": (),
    "schedulefree": (),
}
POINTS = [(name, where, times) for name in OPTIMIZERS for where, times in zip("ssooo", (1, 3, 1, 2, 3), strict=True)]


@pytest.mark.parametrize(("name", "where", "times"), of_the_day(4, POINTS))
def test_any_allocation_of_a_step_may_fail(place: Place, name: str, where: str, times: int) -> None:
    """``where``: s anywhere in the step, o in the optimizer; failing 1, 2 or 3 times leads down 0, 1 or 2 fallbacks."""
    settings = (*TRAIN_ONLY, f"recipe.optimizer.name={name}", *OPTIMIZERS[name])
    size, in_optimizer = place.size(settings), where == "o"
    most = size.of_optimizer if in_optimizer else size.allocations
    at = random.Random(f"{name} {where} {times}").randint(1, most)
    trial = place.exhausted("sd15", settings, Exhaustion(step_begins(4), at, times, in_optimizer=in_optimizer))
    assert len(trial.of(events.MemoryExhausted)) == times and len(changes_of(trial)) == times - 1
    if in_optimizer:
        assert {event.stage for event in trial.of(events.MemoryExhausted)} == {"optimizer"}
    assert_right(place, "sd15", settings, trial)


@pytest.mark.parametrize("name", ["adamw", "schedulefree"])
def test_replayed_steps_keep_the_plan_that_they_had(place: Place, name: str) -> None:
    """Only the fourth step fails, the second time after replaying the third; the fallback affects only the fourth."""
    settings = (*TRAIN_ONLY[:-1], "fallbacks=[{exact=false, micro_batch=1}]", f"recipe.optimizer.name={name}")
    whole = place.size(settings).of_optimizer
    exhaustion = Exhaustion(step_begins(4), whole // 2, times=2, in_optimizer=True, later=2 * whole)
    trial = place.exhausted("sd15", settings, exhaustion)
    assert changes_of(trial) == [(3, ONE)]
    assert_right(place, "sd15", settings, trial)


def test_a_moving_average_is_right_after_an_optimizer_that_ran_out(place: Place) -> None:
    settings = (*TRAIN_ONLY, "recipe.ema_decay=0.4", "recipe.learning_rate=0.01")
    most = place.size(settings).of_optimizer
    trial = place.exhausted("sd15", settings, Exhaustion(step_begins(4), most // 2, times=2, in_optimizer=True))
    assert (trial.run.output / "test-ema.safetensors").exists()
    assert_right(place, "sd15", settings, trial)


def test_the_first_step_comes_down_like_the_others(place: Place) -> None:
    half = place.size(TRAIN_ONLY).allocations // 2
    trial = place.exhausted("sd15", TRAIN_ONLY, Exhaustion(phase_begins("train", turn=2), half, times=3))
    assert {event.phase for event in trial.of(events.MemoryExhausted)} == {"first_step"}
    assert changes_of(trial) == [(0, FULL), (0, ONE)]
    assert_right(place, "sd15", TRAIN_ONLY, trial)


def test_a_plan_that_is_too_tight_again_and_again_is_left(place: Place) -> None:
    """Each of four steps fails once; the first three are tried again as they are."""
    settings = (*TRAIN_ONLY, "recipe.steps=6")
    step = place.size(TRAIN_ONLY).allocations
    trial = place.exhausted("sd15", settings, Exhaustion(step_begins(2), step // 2, times=4, later=step + step // 2))
    assert [event.step for event in trial.of(events.MemoryExhausted)] == [1, 2, 3, 4]
    assert changes_of(trial) == [(4, FULL)]
    assert trial.lora() == place.truth("sd15", settings)


class Leftovers(Exhaustion):
    """Notes which memory that the failed attempts took is still in use when the next attempt begins."""

    def __init__(self, wanted: Wanted, at: int, times: int) -> None:
        super().__init__(wanted, at, times)
        self.taken: list[StorageWeakRef] = []
        self.alive: list[int] = []
        self._failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._failed:
            self.alive.append(sum(not storage.expired() for storage in self.taken))
            self.taken, self._failed = [], False
        left = self.left
        try:
            made = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._failed = self.left < left
        if allocates(func, args):
            tensors = [made] if isinstance(made, torch.Tensor) else [one for one in made if one is not None]
            self.taken += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        return made


@pytest.mark.parametrize("share", [0.1, 0.9], ids=["forward", "backward"])
def test_nothing_of_a_failed_attempt_is_in_memory_when_the_next_one_begins(place: Place, share: float) -> None:
    """Python 3.11 and 3.12 keep what was read of a running frame's locals: the error, and all that its frames held."""
    leftovers = Leftovers(step_begins(4), int(share * place.size(TRAIN_ONLY).allocations), times=3)
    trial = place.exhausted("sd15", TRAIN_ONLY, leftovers)
    assert trial.of(events.MemoryExhausted)[0].stage == ("forward" if share < 0.5 else "backward")
    assert leftovers.alive == [0, 0]  # the run is no longer watched after the last failure
    assert_right(place, "sd15", TRAIN_ONLY, trial)


# --- every phase ----------------------------------------------------------------------------------------------------

# Previews, validation and saved files come into it; the base is found in memory once it has been hashed.
WHOLE = (
    "recipe.layers=attention",
    "recipe.steps=4",
    "recipe.captions.shuffle=true",
    "report.validation.every=2",
    "report.validation.timesteps=[200, 800]",
    "report.previews.every=2",
    "report.saving.every_steps=2",
    'fallbacks=[{exact=true, vae_tiling=true, preview_offload=true}, {exact=true, gradient_checkpointing="full"}, '
    "{exact=false, micro_batch=1}]",
)
PHASES: dict[str, tuple[Wanted, str]] = {
    "loading": (phase_begins("load", total=1), "load"),
    "encoding pictures": (phase_begins("cache_pictures"), "cache_pictures"),
    "encoding texts": (phase_begins("cache_texts"), "cache_texts"),
    "measuring the start": (phase_begins("validate"), "validate"),
    "measuring later": (phase_begins("validate", turn=2), "validate"),
    "a checkpoint": (phase_begins("save", turn=2), "checkpoint"),
    "a LoRA file": (phase_begins("save", turn=4), "save"),
    "the first preview": (phase_begins("preview"), "preview"),
    "a later preview": (phase_begins("preview", turn=2), "preview"),
    "the first step": (phase_begins("train", turn=2), "first_step"),
}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything has to be encoded anew."""
    monkeypatch.setenv("IMPASTO_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", of_the_day(4, PHASES))
def test_every_phase_may_fail_once(place: Place, name: str) -> None:
    """After freeing, the same plan is tried again: nothing changes."""
    wanted, phase = PHASES[name]
    family = ("sd15", "sdxl")[list(PHASES).index(name) % 2]
    at = random.Random(name).randint(1, 8)
    trial = place.exhausted(family, WHOLE, Exhaustion(wanted, at))
    (told,) = trial.of(events.MemoryExhausted)
    assert told.phase == phase and (phase == "first_step" or not told.stage)
    assert not changes_of(trial)
    assert_right(place, family, WHOLE, trial)
    drawn = {path.name: path.read_bytes() for path in trial.run.samples.iterdir()}
    assert len(drawn) == 3  # at 0, 2 and 4
    assert [event.step for event in trial.of(events.Validation)] == [0, 2, 4]


@pytest.mark.parametrize(
    ("phase", "at", "changes"),
    [
        ("preview", 300, {"vae_tiling": True, "preview_offload": True}),
        # Neither tiles nor checkpointing lower its peak; smaller micro-batches do, and change the training after it.
        ("validate", 90, ONE),
    ],
    ids=["a preview is tiled and the LoRA stays", "validation takes only what helps it"],
)
def test_what_fails_twice_between_steps_takes_what_helps_it(
    place: Place, phase: str, at: int, changes: dict[str, Any]
) -> None:
    trial = place.exhausted("sd15", WHOLE, Exhaustion(phase_begins(phase, turn=2), at, times=2))
    assert changes_of(trial) == [(2, changes)]
    assert_right(place, "sd15", WHOLE, trial)


def test_a_preview_for_which_nothing_makes_room_pauses_the_run_and_loses_no_step(place: Place) -> None:
    settings = (*WHOLE, "report.saving.checkpoint_every=4")
    trial = place.exhausted("sd15", settings, Exhaustion(phase_begins("preview", turn=2), 300, times=3))
    assert trial.code == 75 and "report.previews" in trial.error.remedy  # type: ignore[union-attr]
    assert (trial.run.checkpoints / "step-00000002").is_dir()  # where none was due
    assert trial.resume().code == 0 and len(trial.of(events.StepEvent)) == 4
    assert trial.lora() == place.truth("sd15", WHOLE)
    fit = json.loads((trial.run.checkpoints / "step-00000004" / "state.json").read_text(encoding="utf-8"))["fit"]
    assert fit["preview_offload"] and fit["vae_tiling"]


def test_averaged_weights_are_put_back_when_their_making_fails(place: Place) -> None:
    """Schedule-Free moves the masters in place to what is measured and saved; two of them are moved here."""
    settings = (*WHOLE, "recipe.optimizer.name=schedulefree", "report.previews.prompts=[]")
    exhaustion = Exhaustion(phase_begins("validate", turn=2), 3, operation="aten::lerp_")
    trial = place.exhausted("sd15", settings, exhaustion)
    assert_right(place, "sd15", settings, trial)


@pytest.mark.usefixtures("own_cache")
def test_the_models_make_room_for_encoding_the_next_portion(place: Place) -> None:
    """The second portion is encoded while the UNet is in memory."""
    second = phase_begins("cache_pictures", turn=3)  # loading the VAE parts the first in two
    trial = place.exhausted("sd15", PORTIONS, Exhaustion(second, 30, times=2))
    assert [(event.phase, event.step) for event in trial.of(events.MemoryExhausted)] == [("cache_pictures", 2)] * 2
    assert_right(place, "sd15", PORTIONS, trial)


# --- encoding has fallback steps of its own ---------------------------------------------------------------------------

ENCODING = (
    *TRAIN_ONLY[:-1],
    'fallbacks=[{exact=false, vae_dtype="bf16"}, {exact=false, vae_encode_tiling=true}, '
    "{exact=false, text_encoder_batch_size=1}]",
)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of the tests' size are cut, too."""
    monkeypatch.setattr("trainer.base.encoding.TILE", 64)


@pytest.mark.usefixtures("own_cache", "small_tiles")
@pytest.mark.parametrize(
    ("times", "changes"),
    [
        (2, [(0, {"vae_dtype": "bf16"})]),
        (3, [(0, {"vae_dtype": "bf16"}), (0, {"vae_encode_tiling": True})]),
    ],
)
def test_images_are_encoded_in_bf16_then_in_tiles(place: Place, times: int, changes: list[Any]) -> None:
    exhaustion = Exhaustion(phase_begins("cache_pictures"), 300, times=times)
    trial = place.exhausted("sd15", ENCODING, exhaustion)
    assert {event.phase for event in trial.of(events.MemoryExhausted)} == {"cache_pictures"}
    assert changes_of(trial) == changes and not any(event.exact for event in trial.of(events.SteppedDown))
    assert_right(place, "sd15", ENCODING, trial)
    assert trial.lora() != place.truth("sd15", ENCODING), "the images were encoded as before"


@pytest.mark.usefixtures("own_cache", "small_tiles")
def test_a_killed_run_keeps_the_images_that_it_encoded_otherwise(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cache is lost meanwhile: they are encoded again as before."""
    exhaustion = Exhaustion(phase_begins("cache_pictures"), 300, times=3)

    def act(event: events.Event) -> None:
        exhaustion.tell(event)
        if isinstance(event, events.StepEvent) and event.step == 3:
            raise Killed

    trial = Trial(place.job(), ENCODING, act).start()
    assert trial.code is None
    changes = changes_of(trial)
    monkeypatch.setenv("IMPASTO_CACHE", str(tmp_path / "another cache"))
    assert trial.resume().code == 0 and len(changes) == 2
    assert trial.lora() == place.truth("sd15", ENCODING, changes)


@pytest.mark.usefixtures("own_cache", "small_tiles")
def test_the_next_portion_is_encoded_in_tiles_when_not_even_the_models_leaving_makes_room(place: Place) -> None:
    settings = (*PORTIONS[:-3], ENCODING[-1], *PORTIONS[-2:])
    # Only the VAE's work counts: setting the models aside copies the masters, for which a GPU needs no memory.
    exhaustion = Exhaustion(phase_begins("cache_pictures", turn=3), 5, times=4, operation="aten::convolution")
    trial = place.exhausted("sd15", settings, exhaustion)
    assert changes_of(trial) == [(2, {"vae_dtype": "bf16"}), (2, {"vae_encode_tiling": True})]
    assert_right(place, "sd15", settings, trial)


@pytest.mark.usefixtures("own_cache")
def test_captions_are_encoded_one_at_a_time_where_there_is_no_room_for_eight(place: Place) -> None:
    exhaustion = Exhaustion(phase_begins("cache_texts"), 40, times=2)
    settings = [*ENCODING, "fit.text_encoder_batch_size=8"]
    trial = Trial(place.job(), settings, exhaustion.tell, on_a_gpu).start()
    assert {event.phase for event in trial.of(events.MemoryExhausted)} == {"cache_texts"}
    assert trial.code == 0 and changes_of(trial) == [(0, {"text_encoder_batch_size": 1})]
    one_by_one = Trial(place.job(), [*ENCODING, "fit.text_encoder_batch_size=1"], planner=on_a_gpu).start()
    assert trial.lora() == one_by_one.lora()


@pytest.mark.usefixtures("own_cache")
def test_where_the_ladder_of_encoding_ends_the_run_pauses_with_a_remedy(place: Place) -> None:
    exhaustion = Exhaustion(phase_begins("cache_pictures"), 30, times=5)
    trial = Trial(place.job(), ENCODING, exhaustion.tell).start()
    assert {"vae_encode_tiling": True} in [changes for _, changes in changes_of(trial)]
    assert trial.code == 75 and "start a new run at a lower resolution;" in trial.error.remedy  # type: ignore[union-attr]
    assert "vae" not in trial.error.remedy  # type: ignore[union-attr] # the plan has done all that it can
    assert trial.resume().code == 0 and trial.lora() == place.truth("sd15", ENCODING)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("phase", "operation"), [("cache_pictures", "aten::convolution"), ("cache_texts", "aten::embedding")]
)
def test_a_run_that_cannot_encode_the_next_shard_pauses_and_loses_no_step(
    place: Place, phase: str, operation: str
) -> None:
    """The models are unloaded by then, and no checkpoint was due after the step before."""
    settings = (*PORTIONS, "recipe.captions.shuffle=true", "report.saving.checkpoint_every=3")
    exhaustion = Exhaustion(phase_begins(phase, turn=3), 1, times=3, operation=operation)
    trial = place.exhausted("sd15", settings, exhaustion)
    assert trial.code == 75 and {event.phase for event in trial.of(events.MemoryExhausted)} == {phase}
    assert "`resume` continues from step 2." in trial.error.remedy  # type: ignore[union-attr]
    assert trial.resume().code == 0
    assert_right(place, "sd15", settings, trial)


def on_a_gpu(job: Job, *_: object) -> PlannedFit:
    """The CPU always repeats exactly, and then captions are encoded one at a time anyway."""
    return PlannedFit(job.fit.replaced(deterministic=False))


def encoding_alone(job: Job, *_: object) -> PlannedFit:
    """A plan whose forecast has no room for encoding beside the models."""
    forecast = Forecast("cpu", (), 0, 0, 0, 0, 0, fits=True, seconds=1.0, step_seconds={}, encodes_alone=True)
    return PlannedFit(job.fit, forecast=forecast)


@pytest.mark.usefixtures("own_cache")
def test_where_a_forecast_has_no_room_for_encoding_beside_them_the_models_leave_before_anything_is_encoded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything fails; all that was learned leaves the card with them."""
    left: list[int] = []
    set_aside = EngineManager.offload

    def watched(keeper: EngineManager) -> bool:
        aside = set_aside(keeper)
        if aside and keeper.engine:
            left.append(keeper.engine.progress.step)
            masters = keeper.engine.master_weights.masters.values()
            assert not any(master.untyped_storage().nbytes() for master in masters)
            assert not keeper.engine.optimizer.state
        return aside

    monkeypatch.setattr(EngineManager, "offload", watched)
    trial = Trial(place.job(), PORTIONS, planner=encoding_alone).start()
    assert left == [2] and not trial.of(events.MemoryExhausted)
    assert_right(place, "sd15", PORTIONS, trial)

    left.clear()
    again = Trial(place.job(), PORTIONS, planner=encoding_alone).start()  # the last portion lies in the cache still
    assert not left, "nothing had to be encoded"
    assert_right(place, "sd15", PORTIONS, again)


def builds(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each time that the models are loaded from now on, whether what the first step needs is encoded."""
    fed: list[bool] = []
    build = EngineManager._build

    def watched(keeper: EngineManager, *, fresh: bool) -> Engine:
        fed.append(keeper.parts.batches.holds(0))
        return build(keeper, fresh=fresh)

    monkeypatch.setattr(EngineManager, "_build", watched)
    return fed


@pytest.mark.usefixtures("own_cache")
def test_a_pause_while_the_models_are_away_loads_them_not_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that the next portion begins with has no checkpoint of its own until then."""
    built = builds(monkeypatch)
    settings = (*PORTIONS, "report.saving.checkpoint_every=3")

    def act(event: events.Event) -> None:
        if isinstance(event, events.PhaseStarted) and event.phase == "cache_pictures" and trial.of(events.StepEvent):
            commands.send(trial.run.commands, "pause")

    trial = Trial(place.job(), settings, act, planner=encoding_alone)
    trial.start()
    assert trial.code == 75 and (trial.run.checkpoints / "step-00000002").is_dir()
    assert built == [True]
    trial.resume()
    assert_right(place, "sd15", settings, trial)


@pytest.mark.usefixtures("own_cache")
def test_what_a_replay_begins_with_is_encoded_before_the_models_return(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torn step goes back to a portion that is not on disk any more; beside the models there is no room for it."""
    settings = (*PORTIONS, "report.saving.checkpoint_every=3")
    torn = Exhaustion(step_begins(3), 2, in_optimizer=True)
    again = Exhaustion(
        lambda event: not torn.left and isinstance(event, events.PhaseStarted) and event.phase == "cache_pictures", 30
    )
    fed = builds(monkeypatch)

    def act(event: events.Event) -> None:
        torn.tell(event)
        again.tell(event)

    trial = Trial(place.job(), settings, act).start()
    assert [event.phase for event in trial.of(events.MemoryExhausted)] == ["train", "cache_pictures"]
    assert fed == [True, True]
    assert_right(place, "sd15", settings, trial)


# --- a quantized base, a kill, the end of the fallbacks ------------------------------


@pytest.mark.parametrize("in_optimizer", [False, True])
def test_a_quantised_base_is_loaded_where_the_job_allows_it(place: Place, in_optimizer: bool) -> None:
    """In the optimizer the steps since the checkpoint are replayed with the base that they had."""
    settings = (*TRAIN_ONLY[:-1], "fit.allow_quantized=true", 'fallbacks=[{exact=false, quantize="nf4"}]')
    # AdamW's step is two operations: the fourth step fails, and again once the third was replayed.
    at, later = (2, 4) if in_optimizer else (20, 20)
    exhaustion = Exhaustion(step_begins(4), at, times=2, in_optimizer=in_optimizer, later=later)
    trial = place.exhausted("sdxl", settings, exhaustion)
    assert [changed for _, changed in changes_of(trial)] == [{"quantize": "nf4"}]
    assert_right(place, "sdxl", settings, trial)
    assert trial.lora() != place.truth("sdxl", settings)


def test_it_is_not_where_the_job_does_not(place: Place) -> None:
    settings = (*TRAIN_ONLY[:-1], 'fallbacks=[{exact=false, quantize="nf4"}]')
    trial = place.exhausted("sd15", settings, Exhaustion(step_begins(4), 20, times=2))
    assert trial.code == 75 and not changes_of(trial)


def test_a_killed_run_goes_on_under_the_plan_it_came_to(place: Place) -> None:
    """The step after which it is killed has no checkpoint of its own: the plan was kept when it changed."""
    settings = (*TRAIN_ONLY, "report.saving.checkpoint_every=3")
    exhaustion = Exhaustion(step_begins(2), place.size(TRAIN_ONLY).allocations // 2, times=3)

    def act(event: events.Event) -> None:
        exhaustion.tell(event)
        if isinstance(event, events.StepEvent) and event.step == 2:
            raise Killed

    trial = Trial(place.job(), settings, act).start()
    assert trial.code is None and changes_of(trial) == [(1, FULL), (1, ONE)]
    frozen = trial.run.job.read_bytes()
    assert trial.resume().code == 0
    assert trial.lora() == place.truth("sd15", settings, [(1, {**FULL, **ONE})])
    assert trial.run.job.read_bytes() == frozen


def test_at_the_end_of_the_ladder_it_pauses_in_words_and_can_be_resumed(place: Place) -> None:
    third = place.size(TRAIN_ONLY).allocations // 3
    trial = place.exhausted("sd15", TRAIN_ONLY, Exhaustion(step_begins(3), third, times=4))
    assert trial.code == 75
    assert isinstance(trial.error, ResumableError) and trial.error.code == "memory.exhausted"
    assert "train, step 3, forward, at unet." in trial.error.sentence and "20.0 MiB" in trial.error.sentence
    assert "Close other programs" in trial.error.remedy
    assert trial.run.read_status().state == "paused"  # type: ignore[union-attr]
    report = read_report(trial.run.report)  # what was lacking is evidence for the next plan
    assert (report.exhausted, report.phases["train"].shortfall) == (4, 20 << 20)
    assert trial.resume().code == 0
    assert trial.lora() == place.truth("sd15", TRAIN_ONLY, [(2, {**FULL, **ONE})])


def test_a_base_that_finds_no_room_ends_in_words_before_anything_is_trained(place: Place) -> None:
    trial = place.exhausted("sd15", TRAIN_ONLY, Exhaustion(phase_begins("load", total=1), 3, times=2))
    assert trial.code == 75 and "(load, at UNet2DConditionModel, 20.0 MiB requested)" in str(trial.error)
    assert trial.resume().code == 0
    assert trial.lora() == place.truth("sd15", TRAIN_ONLY)


def test_other_faults_are_not_taken_for_it(place: Place) -> None:
    exhaustion = Exhaustion(step_begins(3), 50)
    exhaustion.kind, exhaustion.words = RuntimeError, "mat1 and mat2 shapes cannot be multiplied"
    with pytest.raises(RuntimeError, match="shapes"):
        Trial(place.job(), TRAIN_ONLY, exhaustion.tell).start()


def test_a_job_without_a_ladder_gets_one_that_leaves_alone_what_the_user_wrote(place: Place) -> None:
    """The job states micro-batches of two and says nothing of checkpointing."""
    settings = TRAIN_ONLY[:-1]
    trial = place.exhausted("sd15", settings, Exhaustion(step_begins(4), 100, times=3))
    assert changes_of(trial) == [(3, FULL)]
    assert [event.fallback for event in trial.of(events.SteppedDown)] == [2]  # the first is for previews
    assert trial.code == 75 and "Set fit.micro_batch = 1 in the run's job.toml" in trial.error.remedy  # type: ignore[union-attr]
    edit(trial.run, ONE)  # as the remedy says
    assert trial.resume().code == 0
    assert trial.lora() == place.truth("sd15", settings, [(3, {**FULL, **ONE})])


def test_where_the_user_wrote_all_of_the_fit_nothing_is_changed(place: Place) -> None:
    """Freeing and trying again is all that may be done; the same step then succeeds, or the run ends in words."""
    settings = (*TRAIN_ONLY[:-1], "fit.gradient_checkpointing=none", "fit.vae_tiling=false")
    once = place.exhausted("sd15", settings, Exhaustion(step_begins(4), 100))
    assert not changes_of(once)
    assert_right(place, "sd15", TRAIN_ONLY, once)
    twice = place.exhausted("sd15", settings, Exhaustion(step_begins(4), 100, times=2))
    assert twice.code == 75 and not changes_of(twice)
    assert 'Set fit.gradient_checkpointing = "full" or fit.micro_batch = 1' in twice.error.remedy  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("phase", "fit", "advice"),
    [
        ("load", {}, ", or start a new run with fit.allow_quantized = true"),
        ("quantise", {"quantize": "int8"}, ', or start a new run with fit.quantize = "nf4"'),
        ("quantise", {"quantize": "nf4"}, ""),
        ("cache_pictures", {}, ", or start a new run with fit.vae_encode_tiling = true or at a lower resolution"),
        ("cache_pictures", {"vae_encode_tiling": True}, ", or start a new run at a lower resolution"),
        ("cache_texts", {}, ""),
        ("train", {"quantize": "nf4"}, ", or start a new run at a lower resolution or with a lower rank"),
        ("save", {"quantize": "nf4"}, ", or start a new run with a lower rank"),
    ],
)
def test_the_advice_does_not_name_what_the_plan_already_does(phase: Any, fit: dict[str, Any], advice: str) -> None:
    assert remedy(phase, FitConfig.model_validate(fit)) == advice
