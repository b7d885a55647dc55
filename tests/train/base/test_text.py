"""Text conditioning against the pipelines' own `encode_prompt`, and sd-scripts' rules for long texts."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTokenizer

from tests.support.tiny import Family, tiny_configs, tiny_models
from trainer.base.encoding import encode_text, encode_texts, tokenize
from trainer.files.tokens import END, START, vocabulary

PROMPTS = ["a photo of a cat", "", "l'été: 3 émigrés, " * 3, "word " * 200]


def tokenizer(pad: str) -> CLIPTokenizer:
    words, merges = vocabulary()
    made = CLIPTokenizer(vocab=words, merges=cast(Any, merges), pad_token=pad, model_max_length=77)
    # Said once in a tokenizer's life: the pipelines ask for the full length only to name what they cut.
    made.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return made


@pytest.fixture(scope="module")
def pipelines() -> dict[Family, Any]:
    """The pipelines themselves, with transformers' tokenizers on the same vocabulary."""
    sd15, sdxl = tiny_models("sd15"), tiny_models("sdxl")
    scheduler = DDIMScheduler.from_config(tiny_configs("sd15")["scheduler"])
    first = tokenizer("<|endoftext|>")
    return {
        "sd15": StableDiffusionPipeline(
            **sd15,
            tokenizer=first,
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ),
        "sdxl": StableDiffusionXLPipeline(
            **sdxl, tokenizer=first, tokenizer_2=tokenizer("!"), scheduler=scheduler, add_watermarker=False
        ),
    }


def encoders(family: Family) -> list[Any]:
    models = tiny_models(family)
    return [models[part] for part in ("text_encoder", "text_encoder_2") if part in models]


@pytest.mark.expects_logs("The following part of your input was truncated")
@pytest.mark.parametrize("clip_skip", [None, 1, 2, 3])
def test_sd15_equals_the_pipeline(
    pipelines: dict[Family, Any], clip_skip: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a clip skip, diffusers 0.42 still asks for the level that transformers 5.6 dropped.
    monkeypatch.setattr(CLIPTextModel, "text_model", property(lambda self: self), raising=False)
    expected, _ = pipelines["sd15"].encode_prompt(
        PROMPTS, "cpu", 1, False, clip_skip=None if clip_skip in (None, 1) else cast(int, clip_skip) - 1
    )
    got = encode_text("sd15", encoders("sd15"), tokenize("sd15", PROMPTS), clip_skip)
    assert got.pooled is None
    assert torch.equal(got.hidden, expected)


@pytest.mark.expects_logs("The following part of your input was truncated")
@pytest.mark.parametrize("clip_skip", [None, 1, 3])
def test_sdxl_equals_the_pipeline_whatever_the_clip_skip(pipelines: dict[Family, Any], clip_skip: int | None) -> None:
    hidden, _, pooled, _ = pipelines["sdxl"].encode_prompt(
        PROMPTS, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    got = encode_text("sdxl", encoders("sdxl"), tokenize("sdxl", PROMPTS), clip_skip)
    assert torch.equal(got.hidden, hidden)
    assert got.pooled is not None
    torch.testing.assert_close(got.pooled, pooled, rtol=1e-6, atol=1e-6)


def test_sdxl_pools_at_the_first_end_token_even_when_the_config_names_another() -> None:
    models = tiny_models("sdxl", seed=3)
    second = cast(Any, models["text_encoder_2"])
    tokens = tokenize("sdxl", ["a red house"])
    right = encode_text("sdxl", encoders("sdxl"), tokens, None).pooled
    second.text_model.config.eos_token_id = 320
    try:
        models_of_seed = [models["text_encoder"], second]
        first = encode_text("sdxl", models_of_seed, tokens, None).pooled
        second.text_model.config.eos_token_id = 2
        assert torch.equal(cast(Tensor, first), cast(Tensor, encode_text("sdxl", models_of_seed, tokens, None).pooled))
        assert not torch.equal(cast(Tensor, first), cast(Tensor, right))  # another seed: the comparison is no tautology
    finally:
        second.text_model.config.eos_token_id = 2


@pytest.mark.parametrize(("chunks", "length"), [(75, 77), (150, 152), (225, 227)])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_long_texts_are_encoded_row_by_row(family: Family, chunks: int, length: int) -> None:
    text = " ".join(f"tree {index % 10}" for index in range(200))
    tokens = tokenize(family, [text, "short"], chunks)
    got = encode_text(family, encoders(family), tokens, None)
    assert got.hidden.shape[:2] == (2, length)
    rows = [
        encode_text(family, encoders(family), [ids[:1, at : at + 77] for ids in tokens], None)
        for at in range(0, chunks // 75 * 77, 77)
    ]
    middle = torch.cat([row.hidden[0, 1:-1] for row in rows])
    torch.testing.assert_close(got.hidden[0, 1:-1], middle, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.hidden[0, 0], rows[0].hidden[0, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.hidden[0, -1], rows[-1].hidden[0, -1], rtol=1e-5, atol=1e-6)
    if family == "sdxl":
        torch.testing.assert_close(cast(Tensor, got.pooled)[0], cast(Tensor, rows[0].pooled)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunks", [75, 150])
@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_weights_multiply_the_states_as_in_sd_scripts(family: Family, chunks: int) -> None:
    """By the lines of `encode_tokens_with_weights`: states of the plain text, times the weights of their tokens."""
    plain, weighted = "cat " * 80 + "red dog, dog", "cat " * 80 + "([red] dog:1.5), dog"
    expected = encode_text(family, encoders(family), tokenize(family, [plain, ""], chunks), None)
    if chunks == 150:
        expected.hidden[0, 81] *= 1.5 / 1.1
        expected.hidden[0, 82] *= 1.5
    models = encoders(family)
    got = encode_texts(family, models, [weighted, ""], None, torch.device("cpu"), chunks, weighted=True)
    torch.testing.assert_close(got.hidden, expected.hidden, rtol=1e-6, atol=1e-6)
    if family == "sdxl":
        assert torch.equal(cast(Tensor, got.pooled), cast(Tensor, expected.pooled))


def kohya_rows(ids: list[int], rows: int, pad: int) -> list[int]:
    """sd-scripts' way: tokenise to rows x 75 + 2, cut into rows, then mend each row's ends."""
    ids = [START, *ids[: rows * 75], END]
    ids += [pad] * (rows * 75 + 2 - len(ids))
    out: list[int] = []
    for at in range(1, rows * 75, 75):
        row = [ids[0], *ids[at : at + 75], ids[-1]]
        if pad != END and row[-2] not in (END, pad):
            row[-1] = END
        if pad != END and row[1] == pad:
            row[1] = END
        out += row
    return out


@pytest.mark.parametrize("count", [0, 1, 73, 74, 75, 76, 149, 150, 151, 225, 300])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_are_padded_as_sd_scripts_pads_them(count: int, rows: int) -> None:
    first, second = tokenize("sdxl", ["cat " * count], rows * 75)
    assert first.dtype == torch.int64
    assert first[0].tolist() == kohya_rows([2368] * count, rows, END)
    assert second[0].tolist() == kohya_rows([2368] * count, rows, 0)


def test_gradients_reach_the_encoders() -> None:
    models = [cast(nn.Module, model) for model in encoders("sdxl")]
    for model in models:
        model.requires_grad_(True)
    try:
        got = encode_text("sdxl", cast(Any, models), tokenize("sdxl", ["a cat"]), None)
        (got.hidden.sum() + cast(Tensor, got.pooled).sum()).backward()
        assert all(any(p.grad is not None for p in model.parameters()) for model in models)
    finally:
        for model in models:
            model.requires_grad_(False)
            model.zero_grad(set_to_none=True)
