"""Captions padded to their own lengths: gradients, micro-batches, previews, and runs that stop in between."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from tests.support.images import make_picture, recipe_of
from tests.support.jobs import photographs, write_job
from tests.support.loras import Models, random_weights
from tests.support.steps import distance, make_batch, pictures_of, step_models
from tests.support.tiny import tiny_base
from tests.train.base.test_text import kohya_rows
from tests.train.training.run.test_run import Watcher, run_of, same_lora, stop_at, tensors_sha, train
from tests.train.training.test_parity import plain_gradient, reference_loss, scheduler_of_diffusers
from trainer.adapter.attach import Adapter
from trainer.base.encoding import TextConditioning, padded, token_weights, tokenize
from trainer.base.families import FAMILIES as FACTS
from trainer.config.base import Family
from trainer.config.load import load_job
from trainer.config.recipe import ObjectiveConfig
from trainer.dataset.sampling import Sample, draw_sample, micro_batches
from trainer.protocol import events
from trainer.training.objective import NoiseSchedule
from trainer.training.optim.master_weights import MasterWeights
from trainer.training.run.resume import resume
from trainer.training.run.start import start
from trainer.training.step import MicroBatch, training_step

FAMILIES: tuple[Family, ...] = ("sd15", "sdxl")
TIMESTEPS = (3, 250, 600, 990)
WORDS = (10, 100, 170, 40)
"""Tokens of the captions: two need 75, one 150, one 225."""
OWN = recipe_of(64, effective_batch=4, token_chunks=225, caption_padding="caption")
LIMIT = OWN.replaced(caption_padding="limit")


@pytest.fixture(scope="module", params=FAMILIES)
def material(request: pytest.FixtureRequest) -> tuple[Models, Adapter]:
    models = Models.copies(request.param)
    adapter = models.attach()
    random_weights(adapter)
    return models, adapter


def samples_of(words: Sequence[int], recipe: Any = OWN) -> list[Sample]:
    pictures = [make_picture(number, captions=("cat " * count,)) for number, count in enumerate(words)]
    return [draw_sample(picture, recipe, 0, 0) for picture in pictures]


def learn(models: Models, adapter: Adapter, batch: MicroBatch, parts: Sequence[Sequence[Sample]]) -> Tensor:
    """The gradient of an effective batch that is trained in these micro-batches; image n is number n of ``batch``."""
    masters, schedule = MasterWeights(adapter.parameters), NoiseSchedule.create("epsilon", False)
    for part in parts:
        images = pictures_of(batch, [int(sample.image.path.stem) for sample in part])  # type: ignore[arg-type]
        tokens = tokenize(models.family, [sample.caption for sample in part], part[0].tokens)
        micro = dataclasses.replace(images, tokens=tuple(tokens))
        training_step(step_models(models), schedule.to("cpu", torch.float64), ObjectiveConfig(), micro)
        masters.accumulate()
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in masters.masters.values()]
    return torch.cat([gradient.flatten() for gradient in gradients])


def kohya_text(models: Models, words: int, rows: int) -> TextConditioning:
    """What sd-scripts trains a caption with if its max_token_length is ``rows`` x 75, from the encoders themselves."""
    outputs, hidden = [], []
    for encoder, facts in zip(models.text_encoders, FACTS[models.family].text_encoders, strict=True):
        ids = torch.tensor(kohya_rows([2368] * words, rows, facts.pad)).reshape(rows, 77)
        outputs.append(encoder(ids, output_hidden_states=True))
        states = outputs[-1].last_hidden_state if models.family == "sd15" else outputs[-1].hidden_states[-2]
        hidden.append(torch.cat([states[0, :1], *(states[row, 1:76] for row in range(rows)), states[-1, -1:]])[None])
    pooled = outputs[1].text_embeds[:1] if models.family == "sdxl" else None
    return TextConditioning(torch.cat(hidden, dim=-1), pooled)


def kohya_gradient(
    models: Models,
    adapter: Adapter,
    batch: MicroBatch,
    rows: Sequence[int],
    words: Sequence[int] = WORDS,
    *,
    copies: int = 1,
) -> Tensor:
    """The gradient of these captions by diffusers' scheduler and plain autograd, image by image.

    With ``copies``, each conditioning is repeated, as ComfyUI makes conditionings of different lengths equal.
    """
    scheduler = scheduler_of_diffusers("epsilon", False, torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for number, (count, needed) in enumerate(zip(words, rows, strict=True)):
        text = kohya_text(models, count, needed)
        text = TextConditioning(text.hidden.repeat(1, copies, 1), text.pooled)
        image = dataclasses.replace(pictures_of(batch, slice(number, number + 1)), text=text, tokens=None)
        loss = loss + reference_loss(models, scheduler, ObjectiveConfig(), image).sum()
    return plain_gradient(loss, adapter)


@pytest.mark.parametrize("size", [1, 4])
def test_each_caption_is_trained_as_sd_scripts_trains_it_at_the_length_it_needs(
    material: tuple[Models, Adapter], size: int
) -> None:
    models, adapter = material
    batch = make_batch(models.family, TIMESTEPS)
    parts = micro_batches(samples_of(WORDS), size)
    assert [len(part) for part in parts] == ([1] * 4 if size == 1 else [2, 1, 1])
    ours = learn(models, adapter, batch, parts)
    assert distance(ours, kohya_gradient(models, adapter, batch, (1, 2, 3, 1))) < 1e-10
    repeated = kohya_gradient(models, adapter, batch, (1, 2, 3, 1), copies=2)
    assert distance(ours, repeated) < 1e-10, "padding by repetition changes nothing"


def test_trained_text_encoders_learn_from_weighted_captions(material: tuple[Models, Adapter]) -> None:
    models, adapter = material
    batch = make_batch(models.family, TIMESTEPS[:1])
    texts = ["cat cat (cat:1.5) (cat:0.5) cat"]
    micro = dataclasses.replace(
        batch,
        tokens=tuple(tokenize(models.family, texts, weighted=True)),
        token_weights=token_weights(texts).double(),
    )
    masters, schedule = MasterWeights(adapter.parameters), NoiseSchedule.create("epsilon", False)
    training_step(step_models(models), schedule.to("cpu", torch.float64), ObjectiveConfig(), micro)
    masters.accumulate()
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in masters.masters.values()]
    text = kohya_text(models, 5, 1)
    weights = torch.tensor([1.0, 1.0, 1.0, 1.5, 0.5, *[1.0] * 72], dtype=torch.float64)
    reference = dataclasses.replace(
        batch, text=TextConditioning(text.hidden * weights[:, None], text.pooled), tokens=None
    )
    scheduler = scheduler_of_diffusers("epsilon", False, torch.float64)
    loss = reference_loss(models, scheduler, ObjectiveConfig(), reference).sum()
    ours = torch.cat([gradient.flatten() for gradient in gradients])
    assert distance(ours, plain_gradient(loss, adapter)) < 1e-10


def test_captions_that_need_the_limit_are_trained_as_with_padding_to_it(material: tuple[Models, Adapter]) -> None:
    models, adapter = material
    batch, words = make_batch(models.family, TIMESTEPS), (151, 170, 200, 230)
    own, limit = (micro_batches(samples_of(words, recipe), 4) for recipe in (OWN, LIMIT))
    ours = learn(models, adapter, batch, own)
    assert torch.equal(ours, learn(models, adapter, batch, limit))
    assert distance(ours, kohya_gradient(models, adapter, batch, (3,) * 4, words)) < 1e-10


def test_padding_is_part_of_what_a_shorter_caption_teaches(material: tuple[Models, Adapter]) -> None:
    """The UNet attends to padding without a mask, so ``limit`` stays what sd-scripts does, and differs."""
    models, adapter = material
    batch = make_batch(models.family, TIMESTEPS)
    limit = learn(models, adapter, batch, micro_batches(samples_of(WORDS, LIMIT), 4))
    assert distance(limit, kohya_gradient(models, adapter, batch, (3,) * 4)) < 1e-10
    assert distance(learn(models, adapter, batch, micro_batches(samples_of(WORDS), 4)), limit) > 1e-3


def test_padding_added_later_is_the_padding_of_the_encoder(material: tuple[Models, Adapter]) -> None:
    models, _ = material
    with torch.no_grad():
        texts = [kohya_text(models, words, rows) for words, rows in ((10, 1), (0, 1), (10, 3), (100, 2), (100, 3))]
    for short, long in ((texts[0], texts[2]), (texts[3], texts[4])):
        got = padded(short, texts[1], 225)
        assert got.hidden.shape == long.hidden.shape and got.pooled is short.pooled
        torch.testing.assert_close(got.hidden, long.hidden, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, three of whose captions need 150 tokens and one 225."""
    folder = tmp_path_factory.mktemp("caption lengths")
    captions = sorted(photographs(folder / "pictures").glob("*.txt"))
    for caption, more in zip(captions[:4], (90, 100, 110, 180), strict=True):
        text = caption.read_text(encoding="utf-8").strip()
        caption.write_text(text + ", fine detail" * (more // 3), encoding="utf-8")
    return folder


SETTINGS = [
    *("recipe.token_chunks=225", "recipe.effective_batch=4", "recipe.steps=3", "recipe.captions.tag_dropout=0.3"),
    *("recipe.captions.dropout=0.1", "report.validation.timesteps=[500]", "report.previews.prompts=[]"),
    "recipe.captions.token_warmup_step=4",
]
PREVIEWS = [
    "report.previews.every=3",
    'report.previews.prompts=[{prompt="sks, a cat", negative="' + "blurry, " * 50 + '", steps=1}]',
]


def job_in(folder: Path, shared: Path, family: Family) -> Path:
    return write_job(folder, tiny_base(family, shared / "bases", depth=1), shared / "pictures")


@pytest.mark.parametrize("family", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_micro_batches_of_one_and_four_learn_the_same_lora(shared: Path, tmp_path: Path, family: Family) -> None:
    live = ["recipe.text_encoder.learning_rate=1e-4"] if family == "sd15" else []
    loras = []
    for size in (1, 4):
        job = job_in(tmp_path / str(size), shared, family)
        loras.append(safetensors.torch.load_file(train(job, [*SETTINGS, *live, f"fit.micro_batch={size}"])))
    assert load_job(run_of(job).job).recipe.caption_padding == "caption"
    for one, four in zip(*(lora.values() for lora in loras), strict=True):
        torch.testing.assert_close(one.float(), four.float(), rtol=2e-3, atol=2e-6)


def test_a_run_with_caption_lengths_resumes_exactly(shared: Path, tmp_path: Path) -> None:
    settings = SETTINGS + PREVIEWS
    whole = train(job_in(tmp_path / "a", shared, "sdxl"), settings)
    job = job_in(tmp_path / "b", shared, "sdxl")
    watcher = Watcher(stop_at(2, job))
    assert start(job, settings, watcher) == 75
    (lengths,) = (event.sentence for event in watcher.of(events.Notice) if event.code == "captions")  # type: ignore[attr-defined]
    assert lengths.endswith("each needs: 2 of 6 up to 75 tokens, 3 up to 150 tokens, 1 up to 225 tokens.")
    assert resume(run_of(job), Watcher()) == 0
    assert same_lora(whole, run_of(job).output / "test.safetensors")


def test_a_run_that_an_earlier_version_started_keeps_its_padding(shared: Path, tmp_path: Path) -> None:
    whole = train(job_in(tmp_path / "a", shared, "sd15"), [*SETTINGS, "recipe.caption_padding=limit"])
    job = job_in(tmp_path / "b", shared, "sd15")
    assert start(job, [*SETTINGS, "recipe.caption_padding=limit"], Watcher(stop_at(2, job))) == 75
    run = run_of(job)
    lines = run.job.read_text(encoding="utf-8").splitlines(keepends=True)
    run.job.write_text("".join(line for line in lines if "caption_padding" not in line), encoding="utf-8")
    record = run.path / "run.json"
    facts = json.loads(record.read_text(encoding="utf-8"))
    for attempt in facts["attempts"]:
        del attempt["job"]["recipe.caption_padding"]
    record.write_text(json.dumps(facts), encoding="utf-8")
    assert load_job(run.job).recipe.caption_padding is None
    assert resume(run, Watcher()) == 0
    lora = run.output / "test.safetensors"
    assert tensors_sha(lora) == tensors_sha(whole)
