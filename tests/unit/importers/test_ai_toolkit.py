"""Jobs of ai-toolkit: each setting has one outcome, and numbers mean what they mean there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import cli
from trainer.config.job import Job
from trainer.errors import ImpastoError
from trainer.importers.ai_toolkit.datasets import resolutions_of
from trainer.importers.ai_toolkit.options import CHOSEN_HERE, OPEN_TABLES, OPTIONS, UNAVAILABLE, WITHOUT_EFFECT
from trainer.importers.reading import read_job
from trainer.importers.translation import ImportedJob

PINNED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "imports" / "ai_toolkit.json").read_text("utf-8")
)
# As ai-toolkit's own examples are written, for SDXL.
WHOLE = r"""
job: extension
config:
  # this name will be the folder and filename name
  name: "my_first_lora_v1"
  process:
    - type: 'sd_trainer'
      training_folder: "output"
      device: cuda:0
      trigger_word: "p3r5on"
      training_seed: 7
      network:
        type: "lora"
        linear: 32
        linear_alpha: 16
        network_kwargs:
          only_if_contains:
            - "attn2"
            - "ff.net"
      save:
        dtype: float16 # precision to save
        save_every: 250
        max_step_saves_to_keep: 4
        push_to_hub: false
      datasets:
        - folder_path: "C:\\data\\me"
          caption_ext: "txt"
          caption_dropout_rate: 0.05
          shuffle_tokens: false
          cache_latents_to_disk: true
          num_repeats: 3
          resolution: [ 512, 768, 1024 ]
        - folder_path: "C:\\data\\women"
          is_reg: yes
          resolution: 1024
          flip_x: true
      train:
        batch_size: 2
        steps: 2000
        gradient_accumulation_steps: 4
        train_unet: true
        train_text_encoder: false
        content_or_style: content
        noise_scheduler: "ddpm"
        optimizer: "adamw8bit"
        lr: 1e-4
        skip_first_sample: true
        ema_config:
          use_ema: true
          ema_decay: 0.99
        dtype: bf16
      model:
        name_or_path: "C:\\models\\sdxl.safetensors"
        is_xl: true
      sample:
        sampler: "ddpm"
        sample_every: 250
        width: 1024
        height: 1024
        prompts:
          - "[trigger] holding a sign --w 512 --cfg 5 --d 3"
          - "a horse is a DJ"
        neg: ""
        seed: 42
        walk_seed: true
        guidance_scale: 4
        sample_steps: 20
meta:
  name: "[name]"
  version: '1.0'
"""


def process(**stated: object) -> dict[str, Any]:
    """Return a job with these settings of its process, which name those in tables as `train__lr`."""
    made: dict[str, Any] = {
        "type": "sd_trainer",
        "model": {"name_or_path": "own/er", "arch": "sdxl"},
        "datasets": [{"folder_path": "cats"}],
    }
    for name, value in stated.items():
        *tables, key = name.split("__")
        place = made
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
    return {"job": "extension", "config": {"name": "a", "process": [made]}}


def imported(folder: Path, **stated: object) -> ImportedJob:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(process(**stated)), encoding="utf-8")
    return read_job(path)


def job(folder: Path, **stated: object) -> Job:
    return imported(folder, **stated).job("a")


def outcomes(found: ImportedJob) -> dict[str, str]:
    """Return the outcome of each setting; each has one."""
    count = Counter(setting.name for setting in found.found.settings)
    assert {name: number for name, number in count.items() if number > 1} == {}
    assert count.keys() == found.found.stated.keys()
    return {setting.name: setting.outcome for setting in found.found.settings}


def test_the_settings_and_their_defaults_are_those_of_ai_toolkit() -> None:
    theirs = PINNED["config"].keys() | PINNED["process"].keys() - {"name"}
    assert theirs - OPTIONS.keys() == {*OPEN_TABLES}
    # The rest are of the file, of other jobs and of the program's window.
    assert OPTIONS.keys() - theirs == {"config.name", "device", "job", "meta", "slider", "sqlite_db_path", "type"}
    listed = {*" ".join((*CHOSEN_HERE.values(), WITHOUT_EFFECT)).split(), "sample.prompts", "sample.samples"}
    for name, default in PINNED["config"].items():
        if name in UNAVAILABLE:
            assert UNAVAILABLE[name][1] == default, name
        elif name not in listed and name not in OPEN_TABLES:
            assert OPTIONS[name].default == (None if name == "sample.neg" else default), name


def test_a_whole_job(tmp_path: Path) -> None:
    path = tmp_path / "train_lora.yaml"
    path.write_text(WHOLE, encoding="utf-8")
    found = read_job(path, moved=[("c:\\", "/mnt/c")])
    assert "unavailable" not in outcomes(found).values()
    made = found.job("other")
    assert made.name == "my_first_lora_v1" and made.base.model == str(Path("/mnt/c/models/sdxl.safetensors"))
    recipe = made.recipe
    assert (recipe.rank, recipe.alpha, recipe.learning_rate, recipe.seed) == (32, 16.0, 1e-4, 7)
    assert recipe.text_encoder.learning_rate == recipe.text_encoder_2.learning_rate == 0.0
    # The older accumulation counts batches as steps: 2000 of them, 4 for each step of the optimizer, of 2 images each.
    assert (recipe.steps, recipe.effective_batch) == (500, 8)
    assert (made.report.saving.every_steps, made.report.saving.keep, made.report.previews.every) == (62, 4, 62)
    assert made.report.previews.first is False and recipe.ema_decay == 0.99
    assert [(block.match, block.rate_factor) for block in recipe.blocks or ()] == [
        ("unet.*", 0.0),
        ("unet.*attn2*", 1.0),
        ("unet.*ff.net*", 1.0),
    ]
    first, second = made.dataset.folders
    assert (first.path, first.trigger, first.repeats) == (str(Path("/mnt/c/data/me")), "p3r5on", 3)
    assert recipe.resolution == 512 and first.resolutions == (512, 768, 1024)
    assert (second.kind, second.trigger, second.repeats) == ("regularization", None, 2)  # each image and its mirror
    assert second.resolutions == (1024,) and second.images is not None and second.images.flip is True
    one, two = made.report.previews.prompts
    assert (one.prompt, one.width, one.height, one.seed, one.guidance) == ("p3r5on holding a sign", 512, 1024, 3, 5.0)
    assert (two.prompt, two.width, two.seed, two.steps, two.guidance) == ("a horse is a DJ", 1024, 43, 20, 4.0)


VALUES = {
    "train.optimizer": "lion", "train.lr_scheduler": "cosine", "network.type": "lokr",
    "train.content_or_style": "style",
    "train.loss_type": "mae", "save.dtype": "bf16", "network.dropout": 0.5, "train.ema_config.ema_decay": 0.5,
    "model.arch": "sdxl", "train.optimizer_params": {"weight_decay": 0.1}, "network.network_kwargs": {"a": 1},
    "train.lr_scheduler_params": {"eta_min": 1e-7}, "train.noise_offset": 0.1, "sample.samples": [{"prompt": "a"}],
    "sample.prompts": ["a"], "sample.sample_every": 5, "network.lokr_full_rank": False,
}  # fmt: skip
REFUSED = "model.is_auraflow model.is_flux model.is_lumina2 model.is_pixart model.is_pixart_sigma model.is_ssd "
REFUSED += "model.is_v2 model.is_v3 model.is_vega"


@pytest.mark.parametrize("arch", ["sd1", "sdxl"])
def test_each_setting_has_one_outcome_whatever_it_is(arch: str, tmp_path: Path) -> None:
    for name, default in PINNED["config"].items():
        value = VALUES.get(name, not default if isinstance(default, bool) else 3 if default in (None, []) else default)
        if name in ("model.arch", "train.train_unet", *REFUSED.split()):
            continue
        path = tmp_path / "job.yaml"
        made = process(**{name.replace(".", "__"): value})
        made["config"]["process"][0]["model"].setdefault("arch", arch)
        path.write_text(yaml.safe_dump(made), encoding="utf-8")
        found = read_job(path)
        outcomes(found)
        found.job("a")


@pytest.mark.parametrize("name", sorted(UNAVAILABLE))
def test_what_is_unavailable_is_so_only_if_it_is_not_off(name: str, tmp_path: Path) -> None:
    off = UNAVAILABLE[name][1]
    other = not off if isinstance(off, bool) else "other" if off is None or isinstance(off, str) else off + 1
    for value, outcome in ((off, "carried"), (other, "unavailable")):
        found = imported(tmp_path, **{name.replace(".", "__"): value})
        assert outcomes(found)[name] == outcome


def test_defaults_of_the_program(tmp_path: Path) -> None:
    recipe = job(tmp_path).recipe
    assert (recipe.rank, recipe.alpha, recipe.learning_rate) == (4, 1.0, 1e-6)
    assert (recipe.steps, recipe.resolution, recipe.layers) == (1000, 512, "linear")
    # The timesteps 999, 998, ... at places from 1 to 997.
    assert (recipe.objective.timestep_min, recipe.objective.timestep_max) == (
        2,
        998,
    )  # randint(1, 998) of 999, 998, ...
    assert recipe.optimizer.model_dump() | {"eps": 1e-6, "weight_decay": 0.01} == recipe.optimizer.model_dump()
    assert recipe.images.max_upscale == 1.0


@pytest.mark.parametrize(
    ("stated", "rate"), [({"train__lr": 1e-4}, 1.0), ({"train__lr": 0.5}, 0.5), ({"train__unet_lr": 1.5}, 1.5)]
)
def test_prodigy_takes_small_rates_as_1(stated: dict[str, object], rate: float, tmp_path: Path) -> None:
    assert job(tmp_path, train__optimizer="prodigy", **stated).recipe.learning_rate == rate


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"train__lr_scheduler": "constant_with_warmup"}, ("constant", 1000, 0.0)),
        ({"train__lr_scheduler": "cosine", "train__lr": 1e-4, "train__lr_scheduler_params": {"eta_min": 1e-5}},
         ("cosine", 0, 0.1)),
        ({"train__lr_scheduler": "linear"}, ("constant", 0, 0.0)),
        ({"train__lr_scheduler": "linear", "train__lr_scheduler_params": {"start_factor": 1.0, "end_factor": 0.25}},
         ("linear", 0, 0.25)),
        ({"train__lr_scheduler": "step", "train__lr_scheduler_params": {"gamma": 0.1}}, ("constant", 0, 0.0)),
    ],
)  # fmt: skip
def test_schedules(stated: dict[str, object], expected: tuple[str, int, float], tmp_path: Path) -> None:
    schedule = job(tmp_path, **stated).recipe.schedule
    assert (schedule.kind, schedule.warmup) == expected[:2]
    assert schedule.end == pytest.approx(expected[2])


def test_masks_are_divided_by_their_mean(tmp_path: Path) -> None:
    made = job(tmp_path, datasets=[{"folder_path": "cats", "mask_path": "masks", "mask_min_value": 0.1}])
    assert made.dataset.folders[0].mask_folder == str(tmp_path / "masks")
    assert made.recipe.objective.unmasked_weight == 0.1 and made.recipe.objective.normalize_masked_loss is True


HARMLESS = (
    "cache_latents cache_latents_to_disk cache_tensors_to_disk cache_clip_vision_to_disk cache_text_embeddings "
    "load_image_when_caching_latents num_workers prefetch_factor cache_latents_num_workers fast_image_size debug "
    "replay_transforms full_size_control_images control_transparent_color num_controls_from_same_folder "
    "random_triggers_max guidance_type num_frames shrink_video_to_frames fps trim_auto_frame_count_tail "
    "auto_frame_count audio_preserve_pitch audio_normalize do_audio do_i2v"
)
"""How fast images are loaded, and settings of videos and of what is unavailable."""
OTHER_VALUES = {"caption_ext": "tags", "caption_type": "tags", "dataset_path": "dogs.json", "keep_tokens": 2}


@pytest.mark.parametrize("name", sorted(PINNED["dataset"].keys() - HARMLESS.split()))
def test_each_setting_of_a_dataset_has_an_effect_or_a_note(name: str, tmp_path: Path) -> None:
    default = PINNED["dataset"][name]
    other = not default if isinstance(default, bool) else 0.5 if isinstance(default, float) else 256
    other = OTHER_VALUES.get(name, "other" if default is None or isinstance(default, str) else other)
    common = {"folder_path": "cats"} if name != "dataset_path" else {}
    common |= {"mask_path": "masks"} if name == "mask_min_value" else {"is_reg": True} if name == "prior_reg" else {}
    found = []
    for dataset in (common, {**common, name: other}):
        made = imported(tmp_path, datasets=[{"folder_path": "first"}, dataset or {"folder_path": "cats"}])
        found.append((made.folders, made.found.values, made.notes))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("stated", "sides"), [(512, (512,)), (["512", "768"], (512, 768)), (None, (512,)), (500, (496,))]
)
def test_resolutions(stated: object, sides: tuple[int, ...]) -> None:
    assert resolutions_of(stated) == sides


@pytest.mark.parametrize(
    ("stated", "word"),
    [
        ({"model__arch": "flux"}, "flux"),
        ({"model__arch": "zimage:turbo"}, "zimage"),
        ({"model__is_flux": True}, "flux"),
        ({"type": "slider"}, "slider"),
        ({"train__steps": "many"}, "steps"),
        ({"datasets": "cats"}, "datasets"),
        ({"datasets": [{"folder_path": "cats", "resolution": "big"}]}, "datasets|import"),
    ],
)
def test_what_cannot_be_imported_is_said(stated: dict[str, object], word: str, tmp_path: Path) -> None:
    with pytest.raises(ImpastoError, match=word):
        job(tmp_path, **stated)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "[" * 5000,
        "job: [",
        "!!python/object/apply:os.system ['touch made']",
        "job: extension\nconfig: {process: !!python/name:os.system }",
        "\x00",
        "",
    ],
)
def test_hostile_yaml_is_refused_in_words(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(text, encoding="utf-8")
    assert cli.main(["new", "cat", "--from", "job.yaml"]) == 2
    assert "job.yaml" in capsys.readouterr().err
    assert not Path("made").exists() and not Path("cat").exists()


def test_the_command_line_names_folders_that_are_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yml").write_text(WHOLE, encoding="utf-8")
    assert cli.main(["new", "cat", "--from", "job.yml"]) == 0
    said = capsys.readouterr().out
    assert "C:\\data\\women is not on this PC: import the file again with --map OLD=NEW" in said
    assert "train.lr = 0.0001 → recipe.learning_rate = 0.0001" in said
