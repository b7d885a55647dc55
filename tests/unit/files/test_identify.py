"""What bases and LoRA files are, told from headers and configs alone; every wrong kind is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.raw import UNET, base_shapes, write_shapes
from trainer.errors import BaseModelError, LoraFileError
from trainer.files.architecture import Family
from trainer.files.assets import asset_path
from trainer.files.identify import identify_base, identify_lora, identify_vae

Shapes = dict[str, tuple[int, ...]]


def without(shapes: Shapes, text: str) -> Shapes:
    return {name: shape for name, shape in shapes.items() if text not in name}


def wider(shapes: Shapes, width: int) -> Shapes:
    return {name: (1, width) if "attn2" in name else shape for name, shape in shapes.items()}


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_a_plain_single_file(tmp_path: Path, family: Family) -> None:
    identity = identify_base(write_shapes(tmp_path / "model.safetensors", base_shapes(family)))
    assert (identity.form, identity.family, identity.has_vae) == ("single", family, True)
    assert (identity.prediction, identity.zero_terminal_snr) == ("epsilon", False)
    assert identity.configs["unet"]["cross_attention_dim"] == {"sd15": 768, "sdxl": 2048}[family]
    assert len(identity.evidence) == 2


def test_a_file_without_a_vae_is_a_base_and_says_so(tmp_path: Path) -> None:
    shapes = without(base_shapes("sdxl"), "first_stage_model")
    assert not identify_base(write_shapes(tmp_path / "model.safetensors", shapes)).has_vae


SD15, SDXL = base_shapes("sd15"), base_shapes("sdxl")
CHANNELS = f"{UNET}input_blocks.0.0.weight"


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (SD15 | {CHANNELS: (1, 9, 1, 1)}, "an inpainting model"),
        (SDXL | {CHANNELS: (1, 9, 1, 1)}, "an inpainting model"),
        (SD15 | {CHANNELS: (1, 8, 1, 1)}, "InstructPix2Pix"),
        (SD15 | {CHANNELS: (1, 5, 1, 1)}, "a depth model"),
        (SD15 | {CHANNELS: (4,)}, "not a usable base"),
        (wider(without(SDXL, "embedders.0"), 1280), "the SDXL refiner"),
        (wider(SD15, 1024), "an SD 2 model"),
        (wider(without(SD15, "cond_stage"), 1024) | {"cond_stage_model.model.ln_final.bias": (1,)}, "an SD 2 model"),
        (wider(SD15, 640), "neither SD 1.5 nor SDXL"),
        (without(SDXL, "transformer_blocks.9"), "a distilled or modified SDXL"),
        (without(SDXL, "middle_block"), "a distilled or modified SDXL"),
        (without(SD15, "middle_block"), "a distilled or modified SD 1.5"),
        (without(SD15, "input_blocks.2."), "a distilled or modified SD 1.5"),
        (without(SDXL, "conditioner"), "without its text encoders"),
        (without(SDXL, "embedders.1"), "without its text encoders"),
        ({f"{UNET}double_blocks.0.img_attn.proj.weight": (1,)}, "a Flux model"),
        ({"transformer.single_transformer_blocks.0.norm.linear.weight": (1,)}, "a Flux model"),
        ({f"{UNET}joint_blocks.0.x_block.attn.qkv.weight": (1,)}, "an SD 3 model"),
        ({f"{UNET}cap_embedder.0.weight": (1,)}, "Lumina"),
        ({"adaln_single.linear.weight": (1,)}, "PixArt"),
        ({"clip_txt_mapper.weight": (1,)}, "Stable Cascade"),
        (SDXL | {"edm_vpred.sigma_max": (1,)}, "EDM"),
        ({"lora_unet_mid_block_attentions_0_proj_in.lora_down.weight": (1,)}, "a LoRA, not a base"),
        ({"unet.mid_block.attentions.0.proj_in.lora_A.weight": (1,)}, "a LoRA, not a base"),
        ({"lora_unet_mid_block_attentions_0_proj_in.hada_w1_a": (1,)}, "a LoRA, not a base"),
        ({"control_model.input_hint_block.0.weight": (1,)}, "a ControlNet"),
        ({"controlnet_cond_embedding.conv_in.weight": (1,)}, "a ControlNet"),
        ({"ip_adapter.1.to_k_ip.weight": (1,)}, "an IP-Adapter"),
        ({"down_blocks.0.motion_modules.0.proj_in.weight": (1,)}, "AnimateDiff"),
        ({"emb_params": (1, 768)}, "embedding"),
        ({"clip_l": (1, 768), "clip_g": (1, 1280)}, "embedding"),
        ({"first_stage_model.encoder.conv_in.weight": (1,)}, "only a VAE"),
        ({"encoder.conv_in.weight": (1,), "decoder.conv_in.weight": (1,)}, "only a VAE"),
        ({"input_blocks.0.0.weight": (1,)}, "only a UNet"),
        ({"conv_in.weight": (1,), "time_embedding.linear_1.weight": (1,)}, "only a UNet"),
        ({"text_model.embeddings.token_embedding.weight": (1,)}, "only a text encoder"),
        ({"something.else": (1,)}, 'first tensor is "something.else"'),
        ({}, "no tensor"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, shapes: Shapes, says: str) -> None:
    with pytest.raises(BaseModelError, match=says) as caught:
        identify_base(write_shapes(tmp_path / "model.safetensors", shapes))
    assert caught.value.remedy
    assert "model.safetensors" in caught.value.sentence


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".bin", ".CKPT"])
def test_pickles_are_refused_with_the_way_out(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"\x80\x02}q\x00")
    with pytest.raises(BaseModelError, match="pickle") as caught:
        identify_base(path)
    assert "safetensors" in caught.value.remedy
    with pytest.raises(BaseModelError, match="pickle"):
        identify_vae(path)


V, NOISE = "v", "epsilon"


@pytest.mark.parametrize(
    ("name", "extra", "metadata", "yaml", "expected"),
    [
        ("m", {"v_pred": (0,)}, {}, None, (V, False)),
        ("m", {"v_pred": (0,), "ztsnr": (0,)}, {}, None, (V, True)),
        ("m", {"ztsnr": (0,)}, {}, None, (NOISE, False)),
        ("m", {}, {"modelspec.prediction_type": "v"}, None, (V, None)),
        ("m", {}, {"modelspec.prediction_type": "v_prediction", "ss_zero_terminal_snr": "True"}, None, (V, True)),
        ("m", {}, {"modelspec.prediction_type": "epsilon"}, None, (NOISE, False)),
        ("m-vpred", {}, {"modelspec.prediction_type": "epsilon"}, None, (NOISE, False)),
        ("m", {"v_pred": (0,)}, {"modelspec.prediction_type": "epsilon"}, None, (V, False)),
        ("m", {}, {}, 'model:\n  params:\n    parameterization: "v"\n', (V, None)),
        ("m", {}, {}, "model:\n  params:\n    parameterization: v\n    zero_terminal_snr: true\n", (V, True)),
        ("m", {}, {}, "scaling_config:\n  target: sgm.modules.denoiser_scaling.VScaling\n", (V, None)),
        ("m", {}, {}, "parameterization: eps\n", (NOISE, False)),
        ("m", {}, {}, "params:\n  verbose: false\n", (NOISE, False)),
        ("noobaiXL_vPred10", {}, {}, None, (None, None)),
        ("model-v-prediction", {}, {}, None, (None, None)),
        ("model-ztsnr", {}, {}, None, (None, None)),
        ("dreamvprime", {}, {}, None, (NOISE, False)),
    ],
)
def test_what_a_single_file_predicts(
    tmp_path: Path, name: str, extra: Shapes, metadata: dict[str, str], yaml: str | None, expected: tuple[Any, Any]
) -> None:
    path = write_shapes(tmp_path / f"{name}.safetensors", SDXL | extra, metadata)
    if yaml is not None:
        path.with_suffix(".yaml").write_text(yaml, encoding="utf-8")
    identity = identify_base(path)
    assert (identity.prediction, identity.zero_terminal_snr) == expected


def diffusers_folder(folder: Path, family: Family = "sd15", **unet: Any) -> Path:
    """A diffusers folder with the published configs and empty weights."""
    shutil.copytree(asset_path("models", family), folder)
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}', encoding="utf-8")
    for part in folder.iterdir():
        if (part / "config.json").is_file():
            name = "model" if part.name.startswith("text") else "diffusion_pytorch_model"
            write_shapes(part / f"{name}.safetensors", {"x": (1,)})
    change_json(folder / "unet" / "config.json", unet)
    return folder


def change_json(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize(("kind", "expected"), [("epsilon", NOISE), ("v_prediction", V)])
@pytest.mark.parametrize("zero", [True, False])
def test_a_folder(tmp_path: Path, family: Family, kind: str, expected: str, zero: bool) -> None:
    folder = diffusers_folder(tmp_path / "Mein Modell", family)
    change_json(
        folder / "scheduler" / "scheduler_config.json", {"prediction_type": kind, "rescale_betas_zero_snr": zero}
    )
    identity = identify_base(folder)
    assert (identity.form, identity.family) == ("folder", family)
    assert (identity.prediction, identity.zero_terminal_snr) == (expected, zero)


def test_a_folder_without_scheduler_goes_by_custom_or_is_undecided(tmp_path: Path) -> None:
    for name, expected in (("model", NOISE), ("model-vpred", None)):
        folder = diffusers_folder(tmp_path / name)
        shutil.rmtree(folder / "scheduler")
        assert identify_base(folder).prediction == expected


@pytest.mark.parametrize(
    ("family", "unet", "says"),
    [
        ("sd15", {"in_channels": 9}, "an inpainting model"),
        ("sd15", {"cross_attention_dim": 1024}, "an SD 2 model"),
        ("sdxl", {"cross_attention_dim": 1280}, "the SDXL refiner"),
        ("sdxl", {"transformer_layers_per_block": [1, 2, 4]}, "distilled"),
        ("sdxl", {"transformer_layers_per_block": [1, [2, 1], [4, 4]]}, "distilled"),
        ("sdxl", {"mid_block_type": "UNetMidBlock2D"}, "distilled"),
        ("sd15", {"layers_per_block": 1}, "distilled"),
        ("sd15", {"time_cond_proj_dim": 256}, "LCM"),
        ("sd15", {"block_out_channels": []}, "Could not use the"),
        ("sd15", {"block_out_channels": [320, 10**9]}, "Could not use the"),
        ("sd15", {"layers_per_block": 10**9}, "Could not use the"),
        ("sd15", {"cross_attention_dim": "wide"}, "Could not use the"),
    ],
)
def test_folders_of_other_models_are_refused_by_name(
    tmp_path: Path, family: Family, unet: dict[str, Any], says: str
) -> None:
    with pytest.raises(BaseModelError, match=says):
        identify_base(diffusers_folder(tmp_path / "m", family, **unet))


def drop(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).write_text(text, encoding="utf-8"), None][1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("model_index.json"), "has no model_index.json"),
        (drop("unet"), "without a UNet"),
        (drop("text_encoder"), "text_encoder/config.json is missing"),
        (drop("unet/diffusion_pytorch_model.safetensors"), "contains no weights"),
        (drop("text_encoder/model.safetensors"), "contains no weights"),
        (write("unet/config.json", "{"), "not valid JSON"),
        (write("unet/config.json", "[]"), "not a JSON object"),
        (write("model_index.json", "[" * 100_000), "nested too deeply"),
        (
            write("scheduler/scheduler_config.json", '{"prediction_type": "sample"}'),
            'prediction_type = "sample"',
        ),
        (write("text_encoder/config.json", '{"num_hidden_layers": 1000000}'), "Could not use the"),
    ],
)
def test_broken_folders(tmp_path: Path, change: Callable[[Path], None], says: str) -> None:
    folder = diffusers_folder(tmp_path / "m")
    change(folder)
    with pytest.raises(BaseModelError, match=says) as caught:
        identify_base(folder)
    assert caught.value.remedy


def test_a_folder_with_single_files_says_which_to_name(tmp_path: Path) -> None:
    write_shapes(tmp_path / "dream.safetensors", {"x": (1,)})
    with pytest.raises(BaseModelError, match=r"It contains dream\.safetensors"):
        identify_base(tmp_path)


def test_weights_as_pickle_in_pieces_or_in_half_precision(tmp_path: Path) -> None:
    folder = diffusers_folder(tmp_path / "m")
    unet = folder / "unet"
    whole = unet / "diffusion_pytorch_model.safetensors"
    whole.rename(unet / "diffusion_pytorch_model.fp16.safetensors")
    identify_base(folder)
    (unet / "diffusion_pytorch_model.fp16.safetensors").rename(unet / "piece-00001-of-00002.safetensors")
    index = unet / "diffusion_pytorch_model.safetensors.index.json"
    pieces = {"a": "piece-00001-of-00002.safetensors", "b": "piece-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": pieces}), encoding="utf-8")
    with pytest.raises(BaseModelError, match=r"missing \(piece-00002-of-00002\.safetensors"):
        identify_base(folder)
    write_shapes(unet / "piece-00002-of-00002.safetensors", {"x": (1,)})
    identify_base(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}), encoding="utf-8")
    with pytest.raises(BaseModelError, match=r"missing \(secret\.safetensors"):
        identify_base(folder)
    index.unlink()
    (unet / "diffusion_pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(BaseModelError, match="pickle"):
        identify_base(folder)


def test_embedded_configs_are_checked(tmp_path: Path) -> None:
    good = {"family": "sd15", **{part: {} for part in ("unet", "vae", "text_encoder", "scheduler")}}
    for broken in (
        "{",
        "[]",
        "{}",
        json.dumps({**good, "family": "sd3"}),
        json.dumps({**good, "unet": 3}),
        json.dumps(good),
    ):
        path = write_shapes(tmp_path / "m.safetensors", SD15, {"impasto.configs": broken})
        with pytest.raises(BaseModelError, match=r"Could not (read|use) the"):
            identify_base(path)


def test_a_separate_vae(tmp_path: Path) -> None:
    path = write_shapes(tmp_path / "vae.safetensors", {"encoder.conv_in.weight": (1,), "decoder.conv_in.weight": (1,)})
    assert identify_vae(path) == ((path,), None)
    with pytest.raises(BaseModelError, match="is not a VAE"):
        identify_vae(write_shapes(tmp_path / "other.safetensors", {"x": (1,)}))
    folder = diffusers_folder(tmp_path / "m", "sdxl") / "vae"
    files, config = identify_vae(folder)
    assert files == (folder / "diffusion_pytorch_model.safetensors",)
    assert config is not None
    assert config["scaling_factor"] == 0.13025
    change_json(folder / "config.json", {"_class_name": "AutoencoderTiny"})
    with pytest.raises(BaseModelError, match="AutoencoderTiny"):
        identify_vae(folder)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (
            {
                "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k.lora_down.weight": (8, 768),
                "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k.lora_up.weight": (320, 8),
                "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k.alpha": (),
                "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": (4, 768),
            },
            ("LoRA", "sd15", {"UNet": 1, "text encoder": 1}, (4, 8)),
        ),
        (
            {
                "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k.lora_down.weight": (16, 2048),
                "lora_te2_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": (16, 1280),
            },
            ("LoRA", "sdxl", {"UNet": 1, "text encoder 2": 1}, (16,)),
        ),
        (
            {"unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.lora_A.weight": (4, 2048)},
            ("LoRA", "sdxl", {"UNet": 1}, (4,)),
        ),
        ({"lora_unet_mid_block_resnets_0_conv1.lora_down.weight": (4, 320, 3, 3)}, ("LoRA", None, {"UNet": 1}, (4,))),
        ({"lora_unet_x.hada_w1_a": (40, 8), "lora_unet_x.hada_w1_b": (8, 24)}, ("LoHa", None, {"UNet": 1}, (8,))),
        (
            {"lora_unet_x_attn2_to_k.hada_w1_b": (8, 2048), "lora_unet_x_attn2_to_k.hada_w1_a": (40, 8)},
            ("LoHa", "sdxl", {"UNet": 1}, (8,)),
        ),
        (
            {
                "lora_unet_x.lokr_w1": (4, 6),
                "lora_unet_x.lokr_w2_a": (10, 3),
                "lora_unet_x.lokr_w2_b": (3, 4),
                "lora_te1_y.lokr_w1": (4, 6),
                "lora_te1_y.lokr_w2": (10, 4),
            },
            ("LoKr", "sdxl", {"UNet": 1, "text encoder": 1}, (3,)),
        ),
        (
            {"lora_te_y.oft_blocks": (10, 4, 4), "lora_te_y.alpha": ()},
            ("OFT", "sd15", {"text encoder": 1}, ()),
        ),
    ],
)
def test_what_a_lora_is(tmp_path: Path, shapes: Shapes, expected: tuple[Any, ...]) -> None:
    identity = identify_lora(write_shapes(tmp_path / "lora.safetensors", shapes))
    assert (identity.kind, identity.family, dict(identity.layers), identity.ranks) == expected
    assert all(sentence.endswith(".") for sentence in identity.evidence)


def test_an_oft_is_no_base_and_its_sentence_has_no_rank(tmp_path: Path) -> None:
    path = write_shapes(tmp_path / "a.safetensors", {"lora_te_y.oft_blocks": (10, 4, 4)})
    assert identify_lora(path).evidence[0] == "It is an OFT for SD 1.5."
    with pytest.raises(BaseModelError, match="is a LoRA, not a base"):
        identify_base(path)


def test_a_base_is_no_lora(tmp_path: Path) -> None:
    with pytest.raises(LoraFileError, match="is not a LoRA"):
        identify_lora(write_shapes(tmp_path / "m.safetensors", SD15))


def test_identifying_needs_no_torch(tmp_path: Path) -> None:
    path = write_shapes(tmp_path / "m.safetensors", SD15)
    code = (
        "import sys, pathlib, trainer.files.identify as i;"
        "i.identify_base(pathlib.Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
