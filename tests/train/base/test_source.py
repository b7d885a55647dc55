"""Bases loaded from every form: the same weights, nothing missing, wrong ones refused, quantized ones right."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from bitsandbytes.autograd._functions import MatMul8bitFp
from diffusers import schedulers
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.tiny import (
    Family,
    single_file_metadata,
    single_file_tensors,
    tiny_base,
    tiny_configs,
    tiny_models,
)
from trainer.base.families import FAMILIES, inner_model
from trainer.base.quantized import FrozenInt8Linear
from trainer.base.source import BaseSource, open_base
from trainer.config.base import BaseConfig
from trainer.errors import BaseModelError
from trainer.files.assets import asset_path
from trainer.files.statements import DIFFUSION_SCHEDULERS, SAMPLING, SCHEDULER

FAMILY_AND_FORM = [(family, form) for family in ("sd15", "sdxl") for form in ("folder", "single")]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("Modelle für alle")


def opened(path: Path, **wishes: Any) -> BaseSource:
    return open_base(BaseConfig(model=str(path), **wishes))


def all_models(source: BaseSource, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    return [source.load_unet(dtype, "cpu"), source.load_vae(dtype, "cpu"), *source.load_text_encoders(dtype, "cpu")]


@pytest.mark.parametrize(("family", "form"), FAMILY_AND_FORM)
def test_every_weight_is_the_original(bases: Path, family: Family, form: Any) -> None:
    for loaded, original in zip(
        all_models(opened(tiny_base(family, bases, form=form))), tiny_models(family).values(), strict=True
    ):
        wanted = original.state_dict()
        got = loaded.state_dict()
        assert set(got) == set(wanted)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in loaded.parameters())  # no slice keeps a whole
        assert not loaded.training
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        assert {name for name, _ in loaded.named_buffers()} == {name for name, _ in original.named_buffers()}


@pytest.mark.parametrize(("stored", "wanted"), [(torch.float16, torch.bfloat16), (torch.float32, torch.float16)])
def test_weights_are_cast_on_the_way(bases: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    for loaded, original in zip(
        all_models(opened(tiny_base("sdxl", bases, form="single", dtype=stored)), wanted),
        tiny_models("sdxl").values(),
        strict=True,
    ):
        expected = original.state_dict()
        assert all(torch.equal(t, expected[name].to(stored).to(wanted)) for name, t in loaded.named_parameters())


@pytest.mark.parametrize(("family", "form"), FAMILY_AND_FORM)
def test_what_a_base_says_of_itself(bases: Path, family: Family, form: Any) -> None:
    source = opened(tiny_base(family, bases, form=form, prediction="v", zero_terminal_snr=True))
    assert (source.family, source.form, source.prediction, source.zero_terminal_snr) == (family, form, "v", True)
    assert source.vae_config["scaling_factor"] == {"sd15": 0.18215, "sdxl": 0.13025}[family]
    assert len(source.text_configs) == {"sd15": 1, "sdxl": 2}[family]
    assert source.unet_config["cross_attention_dim"] == {"sd15": 32, "sdxl": 64}[family]
    assert "zero terminal SNR" in source.description
    assert all(len(digest) == 64 for digest in source.files.values())


def test_hashes_follow_content_and_each_part_of_a_folder_by_itself(bases: Path, tmp_path: Path) -> None:
    folder = tiny_base("sdxl", bases)
    twin = Path(shutil.copytree(folder, tmp_path / "copy"))
    first, second = opened(folder), opened(twin)
    assert (first.unet_hash, first.vae_hash, first.text_hash) == (second.unet_hash, second.vae_hash, second.text_hash)
    weights = load_file(twin / "text_encoder_2" / "model.safetensors")
    weights["text_projection.weight"] += 1
    save_file(weights, twin / "text_encoder_2" / "model.safetensors")
    third = opened(twin)
    assert (first.unet_hash, first.vae_hash) == (third.unet_hash, third.vae_hash)
    assert first.text_hash != third.text_hash
    config = json.loads((twin / "vae" / "config.json").read_text(encoding="utf-8"))
    (twin / "vae" / "config.json").write_text(json.dumps({**config, "scaling_factor": 0.5}), encoding="utf-8")
    assert opened(twin).vae_hash != first.vae_hash


def test_old_names_are_understood(bases: Path, tmp_path: Path) -> None:
    """Text encoders without "text_model.", flattened ones of transformers 5.6, and the VAE's attention before 0.18."""
    source = tiny_base("sd15", bases, form="single")
    prefix = "cond_stage_model.transformer."
    renamed = {name.replace(f"{prefix}text_model.", prefix): tensor for name, tensor in load_file(source).items()}
    renamed |= {"model_ema.decay": torch.ones(()), f"{prefix}embeddings.position_ids": torch.arange(77.0)[None]}
    renamed |= {f"model_ema.diffusion_model{index}": torch.ones(1) for index in range(120)}
    path = tmp_path / "old.safetensors"
    save_file(renamed, path, single_file_metadata("sd15", tiny_configs("sd15")))
    folder = Path(shutil.copytree(tiny_base("sd15", bases), tmp_path / "folder"))
    flat = {
        name.removeprefix("text_model."): t for name, t in load_file(folder / "text_encoder/model.safetensors").items()
    }
    save_file(flat, folder / "text_encoder" / "model.safetensors")
    vae_file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    old = {".to_q.": ".query.", ".to_k.": ".key.", ".to_v.": ".value.", ".to_out.0.": ".proj_attn."}
    vae = load_file(vae_file)
    for new, was in old.items():
        vae = {name.replace(new, was): tensor for name, tensor in vae.items()}
    save_file(vae, vae_file)
    for form in (path, folder):
        for loaded, original in zip(all_models(opened(form)), tiny_models("sd15").values(), strict=True):
            expected = original.state_dict()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.named_parameters())


@pytest.mark.parametrize("form", ["single file", "single file in diffusers names", "folder"])
def test_a_separate_vae(bases: Path, tmp_path: Path, form: str) -> None:
    other = cast(nn.Module, tiny_models("sd15", seed=7)["vae"]).state_dict()
    if form == "single file":
        weights = {part: model.state_dict() for part, model in tiny_models("sd15", seed=7).items()}
        whole = single_file_tensors("sd15", weights, tiny_configs("sd15"))
        path = tmp_path / "vae.safetensors"
        mark = "first_stage_model."
        save_file({name.removeprefix(mark): t for name, t in whole.items() if name.startswith(mark)}, path)
    elif form == "folder":
        path = tiny_base("sd15", tmp_path, seed=7) / "vae"
    else:
        path = tmp_path / "vae.safetensors"
        save_file(other, path)
    plain = opened(tiny_base("sd15", bases, form="single"))
    source = opened(tiny_base("sd15", bases, form="single"), vae=str(path))
    loaded = source.load_vae(torch.float32, "cpu")
    assert all(torch.equal(tensor, other[name]) for name, tensor in loaded.named_parameters())
    assert source.vae_hash != plain.vae_hash
    assert source.unet_hash == plain.unet_hash


def without(path: Path, target: Path, *parts: str) -> Path:
    kept = {name: t for name, t in load_file(path).items() if not any(part in name for part in parts)}
    save_file(kept, target, single_file_metadata("sd15", tiny_configs("sd15")))
    return target


def test_a_base_without_vae_needs_one(bases: Path, tmp_path: Path) -> None:
    path = without(tiny_base("sd15", bases, form="single"), tmp_path / "m.safetensors", "first_stage_model")
    with pytest.raises(BaseModelError, match="has no VAE") as caught:
        opened(path)
    assert "base.vae" in caught.value.remedy
    opened(path, vae=str(tiny_base("sd15", bases) / "vae")).load_vae(torch.float32, "cpu")


def test_missing_and_misshapen_tensors_are_named_and_nothing_is_read(bases: Path, tmp_path: Path) -> None:
    whole = tiny_base("sd15", bases, form="single")
    path = without(whole, tmp_path / "m.safetensors", "middle_block.0.in_layers.2", "quant_conv.bias", "mlp.fc1.bias")
    source = opened(path)
    with pytest.raises(BaseModelError, match=r"2 tensors of its .* are missing.*mid_block\.resnets\.0\.conv1"):
        source.load_unet(torch.float32, "cpu")
    with pytest.raises(BaseModelError, match=r"2 tensors of its .* are missing.*quant_conv\.bias"):
        source.load_vae(torch.float32, "cpu")
    with pytest.raises(BaseModelError, match=r"3 tensors of its .* are missing"):
        source.load_text_encoders(torch.float32, "cpu")
    tensors = load_file(whole)
    tensors["model.diffusion_model.out.2.weight"] = torch.zeros(4, 32, 1, 1)
    save_file(tensors, path, single_file_metadata("sd15", tiny_configs("sd15")))
    with pytest.raises(BaseModelError, match=r"conv_out\.weight has shape \(4, 32, 1, 1\)"):
        opened(path).load_unet(torch.float32, "cpu")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"down_block_types": ["NoSuchBlock", "DownBlock2D"]}, "Could not build the model"),
        ({"norm_num_groups": 7}, "Could not build the model"),
        ({"act_fn": "rm -rf"}, "Could not build the model"),
    ],
)
def test_configs_that_no_model_can_be_built_from(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    folder = tiny_base("sd15", tmp_path)
    config = json.loads((folder / "unet" / "config.json").read_text(encoding="utf-8"))
    (folder / "unet" / "config.json").write_text(json.dumps(config | change), encoding="utf-8")
    with pytest.raises(BaseModelError, match=says):
        opened(folder).load_unet(torch.float32, "cpu")


def test_a_file_cut_off_after_it_was_opened(tmp_path: Path) -> None:
    path = tiny_base("sd15", tmp_path, form="single")
    source = opened(path)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(BaseModelError, match="cut off"):
        source.load_unet(torch.float32, "cpu")


def test_a_wrong_family_is_refused_with_what_the_file_is(bases: Path) -> None:
    with pytest.raises(BaseModelError, match=r'is SD 1\.5, but base\.family is "sdxl" \(SDXL\)') as caught:
        opened(tiny_base("sd15", bases, form="single"), family="sdxl")
    assert caught.value.code == "base.wrong_family"
    opened(tiny_base("sd15", bases, form="single"), family="sd15")


def test_an_undecided_prediction_is_asked_for_and_can_be_stated(bases: Path, tmp_path: Path) -> None:
    path = tmp_path / "anime-vpred.safetensors"
    configs = tiny_configs("sdxl")
    del configs["scheduler"]["prediction_type"]
    save_file(load_file(tiny_base("sdxl", bases, form="single")), path, single_file_metadata("sdxl", configs))
    with pytest.raises(BaseModelError, match="Could not determine how") as caught:
        opened(path)
    assert 'prediction = "v"' in caught.value.remedy
    with pytest.raises(BaseModelError, match="Could not determine how") as caught:
        opened(path, prediction="v")
    assert "zero_terminal_snr" in caught.value.remedy
    source = opened(path, prediction="v", zero_terminal_snr=True)
    assert (source.prediction, source.zero_terminal_snr) == ("v", True)
    assert opened(path, prediction="epsilon").zero_terminal_snr is False


def test_the_users_word_goes_before_the_files(bases: Path) -> None:
    path = tiny_base("sd15", bases, form="single", prediction="v")
    assert opened(path).prediction == "v"
    assert opened(path, prediction="epsilon").prediction == "epsilon"
    zero = opened(tiny_base("sd15", bases, form="single", prediction="v", zero_terminal_snr=True), prediction="epsilon")
    assert (zero.prediction, zero.zero_terminal_snr) == ("epsilon", False)


def test_a_missing_path_names_its_neighbour(bases: Path, tmp_path: Path) -> None:
    path = tiny_base("sd15", tmp_path, form="single")
    with pytest.raises(BaseModelError, match="does not exist") as caught:
        opened(path.with_name(path.name.replace("tiny", "tinny")))
    assert path.name in caught.value.remedy


def test_progress_is_told(bases: Path) -> None:
    told: list[tuple[str, int, int]] = []
    source = open_base(
        BaseConfig(model=str(tiny_base("sd15", bases))), lambda phase, done, total: told.append((phase, done, total))
    )
    source.load_unet(torch.float32, "cpu")
    assert ("load", 304, 304) in told
    told.clear()
    assert source.unet_hash
    assert any(phase == "load" and done == total for phase, done, total in told)


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
def test_the_bundled_configs_are_the_published_architectures(tmp_path: Path, family: Family) -> None:
    """Parameter counts of the published models, on the meta device."""
    folder = Path(shutil.copytree(asset_path("models", family), tmp_path / family))
    (folder / "model_index.json").write_text("{}", encoding="utf-8")
    for part in folder.iterdir():
        name = "model" if part.name.startswith("text") else "diffusion_pytorch_model"
        if part.is_dir():
            save_file({"x": torch.zeros(1)}, part / f"{name}.safetensors")
    source = opened(folder)
    counts = [
        sum(p.numel() for p in model.parameters()) for model in (source.empty_unet(), *source.empty_text_encoders())
    ]
    assert counts == {"sd15": [859_520_964, 123_060_480], "sdxl": [2_567_463_684, 123_060_480, 694_659_840]}[family]
    assert source.empty_unet().device.type == "meta"


def run_unet(unet: nn.Module, family: Family) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x, text = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 77, 32, generator=generator)
    extra: dict[str, Any] = {}
    if family == "sdxl":
        extra = {"text_embeds": text[:, 0], "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]] * 2)}
        text = torch.cat([text, text], dim=-1)
    dtype = next(p.dtype for p in unet.parameters() if p.is_floating_point())
    extra = {name: tensor.to(dtype) for name, tensor in extra.items()}
    out: Tensor = unet(x.to(dtype), torch.tensor([5, 900]), text.to(dtype), added_cond_kwargs=extra).sample
    return out


def dequantised_twin(unet: nn.Module, plain: nn.Module) -> nn.Module:
    """The plain UNet with each quantized layer's weight set to the values that layer stands for."""
    import bitsandbytes.functional as bnb

    for name, module in unet.named_modules():
        weight: Any = getattr(module, "weight", None)
        if type(weight).__name__ == "Params4bit":
            values = bnb.dequantize_4bit(weight.data, weight.quant_state)
        elif type(weight).__name__ == "Int8Params":
            scale = weight.SCB if weight.SCB is not None else cast(Any, module).state.SCB
            values = weight.data.double() * scale.double()[:, None] / 127
        else:
            continue
        target = plain.get_submodule(name)
        cast(Any, target).weight.data = values.to(cast(Any, target).weight.dtype)
    return plain


@pytest.mark.parametrize("family", ["sd15", "sdxl"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_lora_gradients_on_a_quantised_base_are_those_on_its_values(bases: Path, family: Family, kind: Any) -> None:
    source = opened(tiny_base(family, bases, form="single"))
    quantized = source.load_unet(torch.float32, "cpu", kind)
    twin = dequantised_twin(quantized, source.load_unet(torch.float32, "cpu"))
    changed = sum(type(m).__name__.startswith("Frozen") for m in quantized.modules())
    assert changed == sum(isinstance(m, nn.Linear) and "transformer_blocks" in n for n, m in twin.named_modules())
    with torch.no_grad():  # a preview before training must not change what training computes
        before = run_unet(quantized, family)
    gradients = []
    for unet in (quantized, twin):
        config = LoraConfig(
            r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "proj_in"], init_lora_weights=False
        )
        inject_adapter_in_model(config, unet)
        for index, (name, parameter) in enumerate(unet.named_parameters()):
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.1
        loss = run_unet(unet, family).square().mean()
        loss.backward()
        gradients.append({n: p.grad for n, p in unet.named_parameters() if p.grad is not None})
    assert set(gradients[0]) == set(gradients[1])
    assert len(gradients[0]) == sum("lora_" in name for name, _ in quantized.named_parameters())
    chosen = {type(module).__name__ for module in quantized.modules() if "peft" in type(module).__module__}
    assert {"nf4": "Linear4bit", "int8": "Linear8bitLt"}[kind] in chosen  # PEFT's own layers for such weights
    first, second = (torch.cat([g[name].flatten() for name in sorted(g)]) for g in gradients)
    assert ((first - second).norm() / second.norm()).item() < 1e-5
    assert not torch.equal(before, run_unet(source.load_unet(torch.float32, "cpu"), family))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_layers_in_bf16_stay_near_the_full_ones_and_are_smaller(bases: Path, kind: Any) -> None:
    source = opened(tiny_base("sdxl", bases, form="single"))
    full, small = source.load_unet(torch.bfloat16, "cpu"), source.load_unet(torch.bfloat16, "cpu", kind)
    with torch.no_grad():
        a, b = run_unet(full, "sdxl").float(), run_unet(small, "sdxl").float()
    assert ((a - b).norm() / a.norm()).item() < {"nf4": 0.1, "int8": 0.02}[kind]
    layer = "mid_block.attentions.0.transformer_blocks.0.ff.net.2.weight"
    sizes = [unet.get_parameter(layer).nbytes for unet in (full, small)]
    assert sizes[0] == sizes[1] * {"nf4": 4, "int8": 2}[kind]


def test_the_layout_of_text_encoders_is_found_either_way() -> None:
    for facts, model in zip(FAMILIES["sdxl"].text_encoders, list(tiny_models("sdxl").values())[2:], strict=True):
        assert isinstance(model, facts.model_class)
        assert inner_model(cast(Any, model)).get_submodule("final_layer_norm")


def test_importing_says_nothing() -> None:
    code = "from trainer.base.imports import quick_imports\nwith quick_imports():\n    import trainer.base.source"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_layers_compute_as_the_library_and_keep_no_input(bases: Path, dtype: torch.dtype) -> None:
    unet = opened(tiny_base("sdxl", bases)).load_unet(dtype, "cpu", "int8")
    layer = next(module for module in unet.modules() if isinstance(module, FrozenInt8Linear))
    random = torch.Generator().manual_seed(3)
    values = torch.randn(2, 5, layer.in_features, generator=random).to(dtype)
    gradient = torch.randn(2, 5, layer.out_features, generator=random).to(dtype)
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    inputs = ours * 2
    kept = weakref.ref(inputs.untyped_storage())
    product = layer(inputs)
    expected = MatMul8bitFp.apply(theirs * 2, layer.weight, None, layer.bias, layer.state)
    assert torch.equal(product, expected)
    del inputs
    assert kept() is None
    product.backward(gradient)
    expected.backward(gradient)
    assert ours.grad is not None and theirs.grad is not None and torch.equal(ours.grad, theirs.grad)


def test_every_key_of_diffusers_schedulers_is_known() -> None:
    """What diffusers writes into the config of a supported scheduler states the process or only how it is sampled."""
    for name in DIFFUSION_SCHEDULERS:
        parameters = inspect.signature(getattr(schedulers, f"{name}Scheduler").__init__).parameters
        unknown = set(parameters) - set(SCHEDULER) - SAMPLING - {"self", "args", "kwargs"}
        assert not unknown, f"{name}: {unknown}"


def test_evidence_does_not_contradict_what_the_job_sets(tmp_path: Path) -> None:
    base = tiny_base("sd15", tmp_path, depth=1)
    found = open_base(BaseConfig(model=str(base)))
    assert "It predicts the noise" in found.evidence[1] or "assumed to predict the noise" in found.evidence[1]
    assert open_base(BaseConfig(model=str(base), prediction="epsilon")).evidence == found.evidence
    told = open_base(BaseConfig(model=str(base), prediction="flow"))
    assert told.evidence == (found.evidence[0], "What it predicts is set in the job.")
