"""Pictures drawn here are those of diffusers' own pipelines, with LoRAs loaded by diffusers itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer

from tests.support.jobs import photographs, write_job
from tests.support.tiny import tiny_base
from trainer.base.drawing import make_sampler
from trainer.config.base import BaseConfig
from trainer.config.job import PromptConfig
from trainer.errors import BaseModelError
from trainer.files.tokens import vocabulary
from trainer.render.renderer import LoraUse, Renderer, render
from trainer.training.run.start import start

PROMPT = PromptConfig(prompt="sks, a cat", negative="dog", steps=3, guidance=4.0, seed=7, width=64, height=64)


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A LoRA of each family, trained at a rate that shows in the pictures."""
    folder = tmp_path_factory.mktemp("loras")
    pictures = photographs(folder / "pictures")
    made = {}
    for family in ("sd15", "sdxl"):
        job = write_job(folder / family, tiny_base(family, folder / "bases"), pictures)  # type: ignore[arg-type]
        settings = ["recipe.learning_rate=0.05", "recipe.text_encoder.learning_rate=0.05", "report.previews.prompts=[]"]
        settings += ["recipe.text_encoder_2.learning_rate=0.05"] if family == "sdxl" else []
        start(job, settings, lambda event: None)
        made[family] = folder / family / "runs" / "test" / "output" / "test.safetensors"
    return made


def tokenizer(**options: str) -> CLIPTokenizer:
    words, merges = vocabulary()
    return CLIPTokenizer(vocab=words, merges=cast(Any, merges), model_max_length=77, **options)


def by_diffusers(
    base: Path, family: str, lora: Path | None, prompt: PromptConfig = PROMPT, scheduler: Any = None
) -> Image.Image:
    kind: Any = diffusers.StableDiffusionXLPipeline if family == "sdxl" else diffusers.StableDiffusionPipeline
    others: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    if family == "sdxl":
        others = {"add_watermarker": False, "tokenizer_2": tokenizer(pad_token="!")}
    pipeline = kind.from_pretrained(base, tokenizer=tokenizer(), **others)
    pipeline.scheduler = scheduler or make_sampler(PROMPT.sampler, "epsilon", zero_terminal_snr=False)
    pipeline.set_progress_bar_config(disable=True)
    if lora:
        pipeline.load_lora_weights(lora)
    result = pipeline(
        prompt.prompt,
        negative_prompt=prompt.negative,
        num_inference_steps=prompt.steps,
        guidance_scale=prompt.guidance,
        width=prompt.width,
        height=prompt.height,
        generator=torch.Generator("cpu").manual_seed(prompt.seed),
    )
    picture: Image.Image = result.images[0]
    return picture


@pytest.mark.parametrize("with_lora", [False, True])
def test_a_base_of_nan_draws_no_black_image(loras: dict[str, Path], tmp_path: Path, with_lora: bool) -> None:
    renderer = Renderer(
        BaseConfig(model=str(tiny_base("sd15", tmp_path / "bases"))),
        [LoraUse(loras["sd15"])] if with_lora else [],
        device=torch.device("cpu"),
        dtype=torch.float32,
        clip_skip=None,
        progress=None,
        on_notice=lambda *_: None,
    )
    for weight in renderer.unet.parameters():
        weight.data.fill_(torch.nan)
    with pytest.raises(BaseModelError, match="NaN or infinity") as caught:
        renderer.render_file(PROMPT, tmp_path)
    assert ("LoRA" in caught.value.sentence) is with_lora
    assert not list(tmp_path.glob("*.png"))


# As in trainer/base/drawing.py: between diffusers, numpy 2 and torch.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "with_lora"),
    [
        ("sd15", False),
        ("sdxl", True),
        pytest.param("sd15", True, marks=pytest.mark.slow),
        pytest.param("sdxl", False, marks=pytest.mark.slow),
    ],
)
def test_equals_the_pipeline(loras: dict[str, Path], tmp_path: Path, family: str, with_lora: bool) -> None:
    base = loras[family].parents[4] / "bases" / f"tiny-{family}-float32-0-epsilon"
    used = [LoraUse(loras[family])] if with_lora else []
    (file,) = render(
        BaseConfig(model=str(base)),
        used,
        [PROMPT],
        tmp_path,
        device=torch.device("cpu"),
        dtype=torch.float32,
        on_drawn=lambda *_: None,
        on_notice=lambda *_: None,
    )
    drawn = np.asarray(Image.open(file), np.int16)
    expected = by_diffusers(base, family, loras[family] if with_lora else None)
    assert np.abs(drawn - np.asarray(expected, np.int16)).max() <= 1
    if with_lora:
        plain = by_diffusers(base, family, None)
        assert np.abs(drawn - np.asarray(plain, np.int16)).max() > 5  # the LoRA shows


def drawn(base: Path, folder: Path, prompts: Sequence[PromptConfig], **settings: Any) -> list[Path]:
    usual: dict[str, Any] = {"loras": [], "on_notice": lambda *_: None, "on_drawn": lambda *_: None, **settings}
    loras = usual.pop("loras")
    device, dtype = torch.device("cpu"), torch.float32
    return render(BaseConfig(model=str(base)), loras, prompts, folder, device=device, dtype=dtype, **usual)


# As above: between diffusers, numpy 2 and torch.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_a_wide_picture_of_a_zero_terminal_base_equals_the_pipeline_with_the_bases_own_scheduler(
    tmp_path: Path,
) -> None:
    base = tiny_base("sd15", tmp_path / "bases", prediction="v", zero_terminal_snr=True)
    prompt = PROMPT.model_copy(update={"width": 96})
    (file,) = drawn(base, tmp_path, [prompt])
    scheduler = diffusers.EulerDiscreteScheduler.from_pretrained(base, subfolder="scheduler")
    assert (scheduler.config.prediction_type, scheduler.config.rescale_betas_zero_snr) == ("v_prediction", True)
    expected = np.asarray(by_diffusers(base, "sd15", None, prompt, scheduler), np.int16)
    assert expected.shape == (64, 96, 3)
    assert np.abs(pixels(file) - expected).max() <= 1
    with Image.open(file) as picture:
        settings = json.loads(picture.text["impasto"])  # type: ignore[attr-defined]
    assert (settings["width"], settings["height"]) == (96, 64)


def typed(prompt: str, **settings: Any) -> PromptConfig:
    return PROMPT.model_copy(update={"prompt": prompt, **settings})


def with_weights(base: Path, plain: str, weights: dict[str, float]) -> Image.Image:
    """Draw with diffusers, its embeddings of the plain text times the weights of words that are one token each."""
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(
        base, tokenizer=tokenizer(), safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    pipeline.scheduler = make_sampler(PROMPT.sampler, "epsilon", zero_terminal_snr=False)
    pipeline.set_progress_bar_config(disable=True)
    positive, negative = pipeline.encode_prompt(plain, "cpu", 1, True, negative_prompt=PROMPT.negative)
    ids = pipeline.tokenizer(plain).input_ids
    for word, weight in weights.items():
        (word_id,) = pipeline.tokenizer(word, add_special_tokens=False).input_ids
        positive[0, ids.index(word_id)] *= weight
    picture: Image.Image = pipeline(
        prompt_embeds=positive, negative_prompt_embeds=negative, num_inference_steps=PROMPT.steps,
        guidance_scale=PROMPT.guidance, width=PROMPT.width, height=PROMPT.height,
        generator=torch.Generator("cpu").manual_seed(PROMPT.seed),
    ).images[0]  # fmt: skip
    return picture


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")
def test_weights_in_prompts_multiply_the_embeddings(loras: dict[str, Path], tmp_path: Path) -> None:
    """Escaped brackets are text, and a prompt without brackets is the same picture either way."""
    base = base_of(loras["sd15"])
    texts = [r"saber \(fate\), a (red cat:1.6), [dog]", "saber, a red cat"]
    weighted, plain = drawn(base, tmp_path, [typed(text, weights=True) for text in texts])
    expected = with_weights(base, "saber (fate), a red cat, dog", {"red": 1.6, "cat": 1.6, "dog": 1 / 1.1})
    assert np.abs(pixels(weighted) - np.asarray(expected, np.int16)).max() <= 1
    flat = with_weights(base, "saber (fate), a red cat, dog", {})
    assert np.abs(pixels(weighted) - np.asarray(flat, np.int16)).max() > 1  # the weights show
    (without,) = drawn(base, tmp_path, [typed(texts[1])])
    assert np.array_equal(pixels(plain), pixels(without))


def test_weights_are_read_if_the_lora_was_trained_so_and_reported_otherwise(
    loras: dict[str, Path], tmp_path: Path
) -> None:
    file, base = loras["sd15"], base_of(loras["sd15"])
    trained_so = tmp_path / "weighted.safetensors"
    save_file(load_file(file), trained_so, {"ss_weighted_captions": "True"})
    prompt, notices = typed("a (cat:1.6)"), list[tuple[str, str]]()

    def picture(lora: Path, **settings: Any) -> np.ndarray:
        prompts = [prompt.model_copy(update=settings)] * 2
        files = drawn(base, tmp_path, prompts, loras=[LoraUse(lora)], on_notice=lambda *notice: notices.append(notice))
        return pixels(files[0])

    read = picture(file, weights=True)
    assert np.array_equal(picture(trained_so), read) and not notices
    as_text = picture(file)
    assert np.abs(as_text - read).max() > 1
    assert [code for code, _ in notices] == ["prompt.weights"] and "(cat:1.6)" in notices[0][1]
    assert np.array_equal(picture(trained_so, weights=False), as_text) and len(notices) == 1


def test_the_vae_stays_in_fp32_whatever_the_rest_computes_in(tmp_path: Path) -> None:
    """In fp16 SDXL's gives black pictures."""
    base = BaseConfig(model=str(tiny_base("sd15", tmp_path)))
    renderer = Renderer(base, [], device=torch.device("cpu"), dtype=torch.bfloat16, clip_skip=None, progress=None,
                        on_notice=lambda *_: None)  # fmt: skip
    models = (renderer.unet, renderer.vae, *renderer.encoders)
    kinds = [next(model.parameters()).dtype for model in models]
    assert kinds == [torch.bfloat16, torch.float32, torch.bfloat16]


def pixels(file: Path) -> np.ndarray:
    with Image.open(file) as picture:
        return np.asarray(picture, np.int16)


def base_of(lora: Path) -> Path:
    return lora.parents[4] / "bases" / f"tiny-{lora.parents[3].name}-float32-0-epsilon"


def test_pictures_are_added_beside_those_that_are_there_and_hold_their_settings(
    loras: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "001.png").write_bytes(b"of somebody")
    lora = LoraUse(loras["sd15"], 0.5)
    told: list[tuple[int, int, Path]] = []
    files = drawn(
        base_of(lora.file), tmp_path, [PROMPT, PROMPT], loras=[lora], on_drawn=lambda *done: told.append(done)
    )
    assert told == [(1, 2, files[0]), (2, 2, files[1])]
    assert [file.name for file in files] == ["000.png", "002.png"]
    assert (tmp_path / "001.png").read_bytes() == b"of somebody"
    with Image.open(files[0]) as picture:
        settings = json.loads(picture.text["impasto"])  # type: ignore[attr-defined]
    assert settings["loras"] == ["test.safetensors:0.5"] and settings["base"] == base_of(lora.file).name
    assert (settings["prompt"], settings["width"], settings["seed"]) == ("sks, a cat", 64, 7)


def test_a_loras_strength_counts(loras: dict[str, Path], tmp_path: Path) -> None:
    base = base_of(loras["sd15"])
    without, none, half, whole, halves = (
        pixels(*drawn(base, tmp_path, [PROMPT], loras=[LoraUse(loras["sd15"], strength) for strength in strengths]))
        for strengths in ([], [0.0], [0.5], [1.0], [0.2, 0.8])
    )
    assert np.array_equal(without, none)
    assert np.abs(half - whole).max() > 2 and np.abs(half - without).max() > 2
    assert np.abs(halves - whole).max() <= 1  # several add up


def test_clip_skip_counts(loras: dict[str, Path], tmp_path: Path) -> None:
    first, second = (pixels(*drawn(base_of(loras["sd15"]), tmp_path, [PROMPT], clip_skip=skip)) for skip in (1, 2))
    assert np.abs(first - second).max() > 2


@pytest.mark.parametrize(("family", "side"), [("sd15", 512), ("sdxl", 1024)])
def test_without_a_size_pictures_have_that_of_the_family(
    loras: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, side: int
) -> None:
    asked: list[tuple[int, int]] = []

    def note(renderer: Renderer, prompt: PromptConfig, width: int, height: int, on_step: Any) -> Image.Image:
        asked.append((width, height))
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr(Renderer, "render", note)  # the picture itself would take a minute
    sizes = [PromptConfig(prompt="a"), PromptConfig(prompt="a", width=64)]
    drawn(base_of(loras[family]), tmp_path, sizes)
    assert asked == [(side, side), (64, side)]


def test_keys_that_fit_nowhere_are_told(loras: dict[str, Path], tmp_path: Path) -> None:
    strange = tmp_path / "strange.safetensors"
    save_file({**load_file(loras["sd15"]), "lora_unet_no_such_layer.alpha": torch.tensor(1.0)}, strange)
    told: list[tuple[str, str]] = []
    drawn(base_of(loras["sd15"]), tmp_path, [PROMPT], loras=[LoraUse(strange)], on_notice=lambda *n: told.append(n))
    ((code, sentence),) = told
    assert code == "lora.unmatched"
    assert (
        sentence == "strange.safetensors: 1 key matches no layer of this base, such as lora_unet_no_such_layer.alpha."
    )
