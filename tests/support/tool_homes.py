"""Write the folders of other tools as they are on people's disks, with small real model files in them.

Layouts and settings files follow the tools' own sources and examples: ComfyUI's extra_model_paths.yaml.example and the
desktop app's extra_models_config.yaml, Forge's webui-user.bat, SwarmUI's Settings.fds, Stability Matrix' library.json
and Models folder, InvokeAI's invokeai.yaml (3 and 4), OneTrainer's training_presets, kohya_ss' config.toml.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.raw import base_shapes, write_shapes

SDXL_V = {**base_shapes("sdxl"), "v_pred": (0,), "ztsnr": (0,)}
LORA = {"lora_unet_mid_block_attentions_0_proj_in.lora_down.weight": (4, 8)}
FLUX = {"double_blocks.0.img_attn.proj.weight": (1,)}
SD2 = {
    **{name: (1, 1024) if "attn2" in name else shape for name, shape in base_shapes("sd15").items()},
    "cond_stage_model.model.ln_final.bias": (1,),
}


def sd15(path: Path) -> Path:
    """Write a file with the header of an SD 1.5 checkpoint."""
    return _file(path, base_shapes("sd15"))


def sdxl(path: Path) -> Path:
    """Write a file with the header of an SDXL checkpoint."""
    return _file(path, base_shapes("sdxl"))


def sdxl_v(path: Path) -> Path:
    """Write an SDXL file for v-prediction, marked as NoobAI marks it."""
    return _file(path, SDXL_V)


def lora(path: Path) -> Path:
    return _file(path, LORA)


def flux(path: Path) -> Path:
    return _file(path, FLUX)


def sd2(path: Path) -> Path:
    return _file(path, SD2)


def text(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def comfy_portable(place: Path, elsewhere: Path) -> Path:
    """Write ComfyUI_windows_portable, which also uses a central folder of the user's and an old A1111 folder."""
    root = place / "ComfyUI_windows_portable" / "ComfyUI"
    sdxl(root / "models" / "checkpoints" / "anime" / "illustrious é.safetensors")
    lora(root / "models" / "loras" / "mine.safetensors")
    text(root / "main.py", "")
    sd15(elsewhere / "my models" / "dreamy.safetensors")
    (elsewhere / "my models" / "LoRA").mkdir()
    text(
        root / "extra_model_paths.yaml",
        "#Rename this to extra_model_paths.yaml and ComfyUI will load it\n"
        "a111:\n    base_path: path/to/stable-diffusion-webui/\n\n    checkpoints: models/Stable-diffusion\n"
        "    loras: |\n         models/Lora\n         models/LyCORIS\n\n"
        f'other_ui:\n    base_path: "{_doubled(elsewhere)}"  # mine\n    checkpoints: my models\n'
        "    loras: >-\n      my models/LoRA\n\n      not there\n",
    )
    return root


def comfy_desktop(settings: Path, documents: Path) -> Path:
    """Write the ComfyUI desktop app, whose settings name its data folder."""
    root = documents / "ComfyUI"
    sdxl_v(root / "models" / "checkpoints" / "noobai-v.safetensors")
    (root / "models" / "loras").mkdir()
    text(
        settings / "ComfyUI" / "extra_models_config.yaml",
        "# ComfyUI extra_model_paths.yaml for win32\ncomfyui_desktop:\n"
        f"  is_default: 'true'\n  custom_nodes: custom_nodes/\n  checkpoints: models/checkpoints/\n"
        f"  loras: models/loras/\n  base_path: {root}\n",
    )
    return root


def forge(place: Path, elsewhere: Path) -> Path:
    """Write Forge, whose launcher names folders on another disk."""
    root = place / "webui"
    (root / "models" / "Stable-diffusion").mkdir(parents=True)
    (root / "models" / "Lora").mkdir()
    sd15(root / "models" / "Stable-diffusion" / "sd-v1-5.safetensors")
    text(root / "models" / "Stable-diffusion" / "Put Stable Diffusion checkpoints here.txt", "")
    text(root / "models" / "Stable-diffusion" / "old.ckpt", "pickle")
    sdxl(elsewhere / "big disk" / "pony.safetensors")
    (elsewhere / "loras").mkdir(parents=True)
    (root / "modules").mkdir()
    text(
        root / "webui-user.bat",
        f"@echo off\n\nset PYTHON=\nset GIT=\nset DISK={elsewhere}\nset COMMANDLINE_ARGS= --xformers ^\n"
        f' --ckpt-dir "%DISK%/big disk" ^\n --lora-dir %DISK%/loras\n\n@REM set COMMANDLINE_ARGS=--ckpt-dir nowhere\n'
        "call webui.bat\n",
    )
    return root


def a1111(place: Path) -> Path:
    """Write an unmodified A1111 on Linux."""
    root = place / "stable-diffusion-webui"
    sd15(root / "models" / "Stable-diffusion" / "anything.safetensors")
    (root / "models" / "Lora").mkdir()
    text(root / "webui-user.sh", '#!/bin/bash\n#export COMMANDLINE_ARGS=""\n')
    return root


def invoke_3(home: Path) -> Path:
    """Write InvokeAI 3: models sorted by family and kind, and a folder for automatic import."""
    root = home / "invokeai"
    sdxl(root / "models" / "sdxl" / "main" / "juggernaut" / "juggernaut.safetensors")
    lora(root / "models" / "sdxl" / "lora" / "other.safetensors")
    (root / "autoimport" / "lora").mkdir(parents=True)
    text(root / "invokeai.yaml", "InvokeAI:\n  Paths:\n    autoimport_dir: autoimport\n    models_dir: models\n")
    return root


def invoke_6(place: Path) -> Path:
    """Write InvokeAI 6: one folder for everything, with a subfolder for each model."""
    root = place / "invoke"
    sdxl(root / "store" / "1f2e" / "realvis.safetensors")
    lora(root / "store" / "77aa" / "glow.safetensors")
    text(root / "invokeai.yaml", "# Internal metadata - do not edit:\nschema_version: 4.0.2\n\nmodels_dir: store\n")
    return root


def swarm(place: Path) -> Path:
    """Write SwarmUI with a second root."""
    root = place / "SwarmUI"
    sdxl(root / "Models" / "Stable-Diffusion" / "OfficialStableDiffusion" / "sd_xl_base_1.0.safetensors")
    (root / "Models" / "Lora").mkdir()
    sd15(place / "more" / "checkpoints" / "extra.safetensors")
    text(
        root / "Data" / "Settings.fds",
        "#IsInstalled\nIsInstalled: true\nPaths:\n\t#Root path for model files.\n"
        f"\tModelRoot: Models;{place / 'more'}\n\tSDModelFolder: Stable-Diffusion;checkpoints\n\tSDLoraFolder: Lora\n"
        "Network:\n\tHost: *\n\tModelRoot: not/this/one\n",
    )
    inner = root / "dlbackend" / "comfy" / "ComfyUI"
    sd15(inner / "models" / "checkpoints" / "inner.safetensors")
    (inner / "models" / "loras").mkdir()
    return root


def stability_matrix(settings: Path, place: Path) -> Path:
    """Write Stability Matrix with its library on another disk, and ComfyUI as a package with shared folders."""
    root = place / "StabilityMatrix" / "Data"
    sdxl(root / "Models" / "StableDiffusion" / "animagine.safetensors")
    (root / "Models" / "Lora").mkdir()
    package = root / "Packages" / "ComfyUI"
    (package / "models" / "checkpoints").mkdir(parents=True)
    (package / "models" / "loras").mkdir()
    text(
        package / "extra_model_paths.yaml",
        f"stability_matrix:\n  checkpoints: {root / 'Models' / 'StableDiffusion'}\n"
        f"  loras: >-\n    {root / 'Models' / 'Lora'}\n\n    {root / 'Models' / 'LyCORIS'}\n",
    )
    text(settings / "StabilityMatrix" / "library.json", json.dumps({"LibraryPath": str(root)}))
    return root


def kohya(place: Path) -> Path:
    """Write kohya_ss with the model folder that its settings name."""
    root = place / "kohya_ss"
    sd15(root / "bases" / "nai.safetensors")
    flux(root / "bases" / "flux1-dev.safetensors")
    text(root / "kohya_gui.py", "")
    text(root / "config.toml", '[model]\nmodels_dir = "./bases"\noutput_name = "new model"\n')
    return root


def one_trainer(place: Path, elsewhere: Path) -> Path:
    """Write OneTrainer, last used with a base on another disk, with presets for bases from the Hub."""
    root = place / "OneTrainer"
    (root / "modules").mkdir(parents=True)
    base = sdxl(elsewhere / "used before.safetensors")
    text(root / "training_presets" / "#.json", json.dumps({"base_model_name": str(base), "model_type": "X"}))
    text(root / "training_presets" / "#hub.json", json.dumps({"base_model_name": "stabilityai/sdxl"}))
    text(root / "training_presets" / "broken.json", "{")
    return root


def hub(cache: Path) -> Path:
    """Write a Hub cache with two revisions of a single file, and something that is not an image model."""
    whole = cache / "models--someone--great-sdxl"
    new = sdxl(whole / "snapshots" / "1111" / "great.safetensors")
    sdxl(whole / "snapshots" / "9999" / "another branch.safetensors")
    text(whole / "refs" / "main", "1111")
    text(cache / "models--openai--whisper" / "snapshots" / "2222" / "config.json", "{}")
    return new


def _file(path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_shapes(path, shapes)


def _doubled(path: Path) -> str:
    """Return a path for YAML's double quotes, with backslashes doubled."""
    return str(path).replace("\\", "\\\\")
