"""What is encoded between epochs, past the disk limit of the cache: how often, beside what, and when alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.images import make_picture
from tests.support.meters import CpuMeter
from tests.support.plans import device_state_with
from tests.support.real_phases import RealRun
from tests.support.tiny import tiny_base, tiny_configs
from tests.support.truth_jobs import truth_jobs
from trainer.base.source import BaseSource, open_base
from trainer.cli.plan_text import remark
from trainer.config.base import BaseConfig
from trainer.config.fit import FitConfig
from trainer.config.job import DatasetConfig, FolderConfig, Job, RecipeOverlay
from trainer.config.recipe import RecipeConfig
from trainer.dataset.image import ImageRecord
from trainer.dataset.sampling import EpochBatches, Sample, measured_samples
from trainer.memory.device.device_state import DeviceState
from trainer.memory.forecast.cache_shards import NO_LATER_SHARDS, LaterShards, first_shard, later_shards
from trainer.memory.forecast.forecast import RunSimulator, forecast_of
from trainer.memory.forecast.schedule import PhaseCounts, RunSchedule
from trainer.memory.planner.planner import Plan, PlanResult
from trainer.memory.planner.remarks import remarks_of
from trainer.memory.planner.request import PlanRequest
from trainer.memory.trace.library import TraceLibrary
from trainer.memory.trace.store import TraceStore
from trainer.memory.trace.workload import Workload
from trainer.training.data.batches import BatchSchedule
from trainer.training.data.latent_cache import Cache

AMPLE = 2**30
LATER = LaterShards(shards=3, images=30, texts=12, epochs_per_shard=2)

# --- how many there are -----------------------------------------------------------------------------------------------


def job_of(gigabytes: float, **recipe: Any) -> Job:
    return Job(
        name="portions",
        base=BaseConfig(model="base", family="sd15"),
        dataset=DatasetConfig(folders=(FolderConfig(path="pictures"),)),
        recipe=RecipeConfig.model_validate({"steps": 40, "effective_batch": 2, "resolution": 64, "seed": 3, **recipe}),
        fit=FitConfig(cache_gigabytes=gigabytes),
    )


def pictures() -> list[ImageRecord]:
    """Ten pictures with three tags each, five steps an epoch."""
    return [
        make_picture(number, bucket=(64, 64), width=90, height=300, captions=(f"a {number}, b, c",))
        for number in range(10)
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> BaseSource:
    base = tiny_base("sd15", tmp_path_factory.mktemp("bases"), depth=1)
    return open_base(BaseConfig(model=str(base), family="sd15"))


def cut(job: Job, shown: Sequence[ImageRecord], source: BaseSource, folder: Path) -> list[list[Sample]]:
    """The showings of each portion, as the feed of a run lists them."""
    feed = BatchSchedule(shown, job, Cache(folder, source, job, torch.device("cpu")), live_text=False)
    portions, first = [], 0
    while first < 40:
        portion, samples = feed._list_shard(first)
        portions.append(samples)
        first = portion.last + 1
    return portions


@pytest.mark.parametrize("epochs_together", [0.01, 0.45, 0.7, 0.95, 1.5, 3.2, 7.9])
def test_portions_are_those_that_a_run_cuts(epochs_together: float, source: BaseSource, tmp_path: Path) -> None:
    """Where every showing differs, to the last; what was encoded for the portion before lies there still."""
    width = source.text_configs[0]["hidden_size"]
    limit = epochs_together * 10 * (2048 + 77 * width * 4)
    job = job_of(limit / 1e9, images={"crop": "random"}, captions={"shuffle": True, "wildcards": True})
    found = later_shards(job, pictures(), source.text_configs)
    portions = cut(job, pictures(), source, tmp_path)
    assert found.shards == len(portions) - 1
    encoded = sum(len({(one.image.id, one.window, one.flip) for one in portion}) for portion in portions[1:])
    assert found.images == pytest.approx(encoded, rel=0.1)


def test_without_chance_only_parts_of_an_epoch_are_encoded_twice_and_with_room_there_is_one_portion() -> None:
    texts = [tiny_configs("sd15")["text_encoder"]]
    assert later_shards(job_of(1.0, images={"crop": "random"}), pictures(), texts) == NO_LATER_SHARDS
    plain = later_shards(job_of(1e-9, images={"crop": "center"}), pictures(), texts)
    # Five parts of an epoch, of which each replaces the one before, in eight epochs.
    assert (plain.shards, plain.images, plain.texts, plain.part) == (39, 78, 78, 0.2)
    shuffled = later_shards(job_of(1e-9, captions={"shuffle": True}), pictures(), texts)
    assert shuffled.shards == 39 and shuffled.texts > 0
    learning = later_shards(job_of(1e-9, captions={"shuffle": True}), pictures(), ())
    assert learning.shards == 39 and (learning.images, learning.texts) == (78, 0)
    assert later_shards(job_of(1e-9), [], texts) == NO_LATER_SHARDS


def test_chance_in_a_folder_counts_as_in_a_recipe() -> None:
    texts = [tiny_configs("sd15")["text_encoder"]]
    tables = {"images": {"crop": "random"}, "captions": {"shuffle": True}}
    overlay = RecipeOverlay.model_validate(tables)
    by_folder = [replace(picture, overlay=overlay) for picture in pictures()]
    for gigabytes in (1e-9, 1e-4):
        drawn = later_shards(job_of(gigabytes, **tables), pictures(), texts)
        assert drawn.images > 0
        assert later_shards(job_of(gigabytes), by_folder, texts) == drawn


def test_what_is_listed_at_once_limits_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [tiny_configs("sd15")["text_encoder"]]
    job = job_of(1.0, images={"crop": "random"})
    monkeypatch.setattr("trainer.memory.forecast.cache_shards.MAX_SHARD_SAMPLES", 30)
    found = later_shards(job, pictures(), texts)
    assert (found.epochs_per_shard, found.shards, found.limited) == (3, 2, "listing")
    disk = later_shards(job.replaced(fit=job.fit.replaced(cache_gigabytes=1e-9)), pictures(), texts)
    assert (disk.epochs_per_shard, disk.part, disk.limited) == (1, 0.2, "disk")
    monkeypatch.setattr("trainer.memory.forecast.cache_shards.MAX_SHARD_SAMPLES", 6)
    found = later_shards(job_of(1.0, images={"crop": "center"}), pictures(), texts)
    assert (found.part, found.shards, found.images, found.limited) == (0.6, 15, 4, "listing")


def test_a_large_dataset_is_known_by_some_of_its_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [tiny_configs("sd15")["text_encoder"]]
    job = job_of(2e-4, images={"crop": "random"}, captions={"shuffle": True})
    shown = [make_picture(n, bucket=(64, 64), width=90, height=300, captions=(f"a {n}, b, c",)) for n in range(40)]
    whole = later_shards(job.replaced(recipe=job.recipe.replaced(steps=160)), shown, texts)
    monkeypatch.setattr("trainer.memory.forecast.cache_shards._MAX_LISTED", 10)
    found = later_shards(job.replaced(recipe=job.recipe.replaced(steps=160)), shown, texts)
    assert (found.shards, found.epochs_per_shard) == (whole.shards, whole.epochs_per_shard)
    assert found.images == pytest.approx(whole.images, rel=0.05)
    assert found.texts == pytest.approx(whole.texts, rel=0.3)  # six orders of three words for each picture


# --- how much is encoded, and what of it lies there already -----------------------------------------------------------

CHANCES: list[dict[str, Any]] = [
    {},
    {"captions": {"shuffle": True}},
    {"captions": {"shuffle": True, "dropout": 0.2, "wildcards": True}, "images": {"crop": "random", "flip": True}},
    {"captions": {"dropout_every_epochs": 2}},
    {"captions": {"dropout_every_epochs": 3, "shuffle": True}, "images": {"flip": True}},
]


def encoded(samples: Sequence[Sample]) -> tuple[int, int]:
    """How many pictures and captions differ."""
    cuts = {(one.image.id, one.window, one.flip) for one in samples}
    return len(cuts), len({one.caption for one in samples})


@pytest.mark.parametrize("gigabytes", [1.0, 1e-4])
@pytest.mark.parametrize("chance", CHANCES)
def test_what_is_encoded_before_the_first_step_is_what_a_run_lists(
    chance: dict[str, Any], gigabytes: float, source: BaseSource, tmp_path: Path
) -> None:
    job, shown = job_of(gigabytes, **chance), pictures()
    (first, *_) = cut(job, shown, source, tmp_path)
    later = later_shards(job, shown, source.text_configs)
    assert first_shard(job, shown, later) == encoded(first)
    measured = measured_samples(shown, job.recipe)
    more = first_shard(job, shown, later, samples=measured, texts=["a preview", "a preview", ""])
    listed = encoded([*first, *measured])
    assert more == (listed[0], listed[1] + 1 + (not any(one.caption == "" for one in first)))
    assert first_shard(job, [], NO_LATER_SHARDS) == (0, 0)


def test_what_much_chance_makes_of_a_large_dataset_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tags have six orders, of which few are left to come; a cut is another one nearly each time."""
    shown = [make_picture(n, bucket=(64, 64), width=90, height=3000, captions=(f"a {n}, b, c",)) for n in range(60)]
    job = job_of(1.0, steps=900, captions={"shuffle": True}, images={"crop": "random"})
    whole = first_shard(job, shown, NO_LATER_SHARDS)
    assert whole == (pytest.approx(60 * 30, rel=0.02), pytest.approx(60 * 6, rel=0.02))
    monkeypatch.setattr("trainer.memory.forecast.cache_shards._MAX_LISTED", 200)
    assert first_shard(job, shown, NO_LATER_SHARDS) == tuple(pytest.approx(count, rel=0.1) for count in whole)


def test_epochs_without_captions_add_no_texts_to_what_a_large_dataset_needs(
    monkeypatch: pytest.MonkeyPatch, source: BaseSource, tmp_path: Path
) -> None:
    shown = [make_picture(n, bucket=(64, 64), width=90, height=300, captions=(f"a {n}, b, c, d",)) for n in range(60)]
    job = job_of(1.0, steps=300, captions={"shuffle": True, "dropout_every_epochs": 2}, images={"crop": "random"})
    drawn = [sample for epoch in range(10) for batch in EpochBatches(shown, job.recipe, epoch) for sample in batch]
    monkeypatch.setattr("trainer.memory.forecast.cache_shards._MAX_LISTED", 200)
    found = first_shard(job, shown, NO_LATER_SHARDS)
    assert found == tuple(pytest.approx(count, rel=0.1) for count in encoded(drawn))


@pytest.mark.parametrize(("captions", "near"), [({}, 0.05), ({"shuffle": True}, 0.1)])
def test_captions_that_grow_are_counted(
    captions: dict[str, Any], near: float, monkeypatch: pytest.MonkeyPatch, source: BaseSource, tmp_path: Path
) -> None:
    tags = ", ".join("abcdefgh")
    shown = [make_picture(n, bucket=(64, 64), width=90, height=300, captions=(f"{n}, {tags}",)) for n in range(60)]
    job = job_of(1.0, steps=300, captions={"token_warmup_step": 75, **captions})
    drawn = [sample for epoch in range(10) for batch in EpochBatches(shown, job.recipe, epoch) for sample in batch]
    whole = encoded(drawn)
    assert first_shard(job, shown, NO_LATER_SHARDS) == (60, pytest.approx(whole[1], rel=near))
    monkeypatch.setattr("trainer.memory.forecast.cache_shards._MAX_LISTED", 100)
    assert first_shard(job, shown, NO_LATER_SHARDS)[1] == pytest.approx(whole[1], rel=0.2)


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("epochs_together", [0.45, 1.5])
def test_shards_end_before_epochs_without_captions(
    every: int, epochs_together: float, source: BaseSource, tmp_path: Path
) -> None:
    width = source.text_configs[0]["hidden_size"]
    job = job_of(epochs_together * 10 * (2048 + 77 * width * 4) / 1e9, captions={"dropout_every_epochs": every})
    found = later_shards(job, pictures(), source.text_configs)
    if epochs_together < 1:
        shards = cut(job, pictures(), source, tmp_path)
        assert found.shards == len(shards) - 1
        texts = sum(len({one.caption for one in shard}) for shard in shards[1:])
        assert found.texts == pytest.approx(texts, rel=0.25)
    else:
        run = BatchSchedule(pictures(), job, Cache(tmp_path, source, job, torch.device("cpu")), live_text=False)
        assert found.epochs_per_shard == every - 1 == (run._list_shard(0)[0].last + 1) / run.steps_per_epoch


def test_shards_are_short_while_captions_grow(source: BaseSource, tmp_path: Path) -> None:
    width = source.text_configs[0]["hidden_size"]
    captions = {"token_warmup_step": 30, "token_warmup_min": 0}
    job = job_of(2.5 * 10 * (2048 + 77 * width * 4) / 1e9, captions=captions)
    shown = [replace(image, captions=(f"{image.id}, " + ", ".join("abcdefghijklmno"),)) for image in pictures()]
    run = BatchSchedule(shown, job, Cache(tmp_path, source, job, torch.device("cpu")), live_text=False)
    found = later_shards(job, shown, source.text_configs)
    assert found.epochs_per_shard == (run._list_shard(0)[0].last + 1) / run.steps_per_epoch == 2
    texts = sum(len({one.caption for one in shard}) for shard in cut(job, shown, source, tmp_path)[1:])
    assert found.texts == pytest.approx(texts, rel=0.25)


def test_what_lies_in_the_cache_is_not_forecast_to_be_encoded(source: BaseSource, tmp_path: Path) -> None:
    job = job_of(1.3e-4, images={"crop": "random"}, captions={"shuffle": True})
    cache = Cache(tmp_path, source, job, torch.device("cpu"))
    portions = cut(job, pictures(), source, tmp_path)

    def found() -> tuple[int, int, int, int]:
        later = later_shards(job, pictures(), source.text_configs, cache.entries)
        return *first_shard(job, pictures(), later, cached=cache.entries), later.images, later.texts

    absent = found()
    assert absent[:2] == encoded(portions[0]) and min(absent) > 0
    for sample in portions[1]:
        cache.latent_store.write(cache.image_key(sample), {"mean": torch.zeros(1)})
    assert found() == (absent[0], absent[1], 0, absent[3])
    for sample in portions[0] + portions[1]:
        cache.latent_store.write(cache.image_key(sample), {"mean": torch.zeros(1)})
        cache.texts.write(cache.text_key(sample.caption), {"hidden": torch.zeros(1)})
    assert found() == (0, 0, 0, 0)


# --- what they take ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> TraceLibrary:
    return TraceLibrary(TraceStore(tmp_path_factory.mktemp("tapes")))


@pytest.fixture(scope="module")
def subject() -> Workload:
    """Previews would come after what is looked at here."""
    job = next(job for job in truth_jobs() if job.name == "sd15 r16 full all phases")
    return replace(job.workload(tiny=True, dtype="fp32"), previews=())


def course_of(
    subject: Workload, traces: TraceLibrary, situation: DeviceState, later: LaterShards = LATER
) -> RunSchedule:
    return RunSchedule(subject, traces, PhaseCounts(later=later), situation.rate)


def test_encoding_between_epochs_takes_what_a_real_run_takes_then(subject: Workload, traces: TraceLibrary) -> None:
    """On the CPU, whose convolutions take buffers of their own: as many beside training as before it."""
    situation, meter, real = device_state_with(AMPLE, workspace=0), CpuMeter(), RealRun(subject, torch.device("cpu"))
    first = meter.measure(real.cache_pictures).requested
    for work in (real.load, partial(real.train, subject.buckets[0].size, 1)):
        meter.measure(work)
    beside = meter.measure(real.cache_pictures).requested
    runs, course = RunSimulator(situation), course_of(subject, traces, situation)
    played = runs.between_epochs(course, None).phases["cache_pictures"]
    alone = runs.simulate(course, None).phases["cache_pictures"]
    peaks = [
        int(phase.played[moment.trace].requested[moment.event])
        for phase in (played, alone)
        for moment in [phase.peak_requested()]
    ]
    assert peaks[0] - peaks[1] == pytest.approx(beside - first, rel=2e-3)
    assert peaks[0] > 3 * peaks[1]


def test_a_forecast_counts_them_beside_training_or_with_the_models_put_aside(
    subject: Workload, traces: TraceLibrary
) -> None:
    ample = device_state_with(AMPLE)
    without, beside = (
        forecast_of(course_of(subject, traces, ample, later), ample, brief=True) for later in (NO_LATER_SHARDS, LATER)
    )
    phases = [found.of("cache_pictures") for found in (without, beside)]
    assert phases[0] and phases[1] and phases[1].allocated > phases[0].allocated + beside.phases[3].allocated // 2
    assert phases[1].seconds == pytest.approx(phases[0].seconds * (20 + 30) / 20)
    texts = [found.of("cache_texts") for found in (without, beside)]
    assert (
        texts[0] and texts[1] and texts[1].seconds == pytest.approx(texts[0].seconds * 4 / 3)
    )  # of 20, 32; eight at once
    assert not beside.encodes_alone and beside.fits

    # Texts are encoded where training holds most; a card with room for training alone has none for that.
    tight = device_state_with(without.reserved)
    course = course_of(subject, traces, tight)
    assert RunSimulator(tight).between_epochs(course, None).reserved > tight.budget
    alone = forecast_of(course, tight, brief=True)
    assert alone.encodes_alone and alone.fits and alone.reserved == without.reserved
    train = [found.of("train") for found in (beside, alone)]
    assert train[0] and train[1] and train[1].seconds == pytest.approx(train[0].seconds + 3 * course.loading())


@pytest.mark.parametrize(("alone", "how"), [(False, "with the model still loaded"), (True, "with the model offloaded")])
def test_a_plan_says_how_they_are_encoded(subject: Workload, traces: TraceLibrary, alone: bool, how: str) -> None:
    situation = device_state_with(AMPLE)
    course = course_of(subject, traces, situation)
    forecast = replace(forecast_of(course, situation, brief=True), encodes_alone=alone)
    question = PlanRequest("portions", subject, FitConfig(), situation, course.counts)
    (found,) = remarks_of(question, PlanResult(situation, Plan(subject.fit, forecast)))
    assert remark(found) == (
        "The cache holds 2 epochs (fit.cache_gigabytes). Images and captions for later epochs "
        f"are encoded as needed: 3 times, {how}."
    )
