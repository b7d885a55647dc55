"""Jobs that were imported from other trainers train: the demo base, and a tiny one with exact settings in the LoRA."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support import ROOT
from tests.support.jobs import photographs
from tests.support.tiny import tiny_base
from trainer import cli
from trainer.protocol.run_directory import RunDirectory

DEMO = ROOT / "assets" / "demo"


def onetrainer(folder: Path) -> Path:
    """Write a configuration of OneTrainer for the pictures in a folder."""
    made = {
        "__version": 11,
        "training_method": "LORA",
        "model_type": "STABLE_DIFFUSION_15",
        "base_model_name": str(DEMO / "base"),
        "concepts": [{"path": str(folder / "pictures"), "image": {"enable_random_flip": True}}],
        "samples": [{"prompt": "a red star", "width": 64, "height": 64, "diffusion_steps": 2}],
        "resolution": "64",
        "epochs": 2,
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-4,
        "learning_rate_scheduler": "COSINE",
        "learning_rate_warmup_steps": 0.5,
        "layer_filter_preset": "full",
        "lora_rank": 4,
        "loss_weight_fn": "MIN_SNR_GAMMA",
        "ema": "GPU",
        "optimizer": {"optimizer": "ADAFACTOR"},
        "text_encoder": {"stop_training_after": 1, "stop_training_after_unit": "EPOCH"},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(made), encoding="utf-8")
    return path


AI_TOOLKIT = """
job: extension
config:
  name: made
  process:
    - type: sd_trainer
      trigger_word: neontube
      network: {{type: lora, linear: 4, linear_alpha: 4, conv: 2, network_kwargs: {{ignore_if_contains: [ff.net]}}}}
      save: {{dtype: float16, save_every: 2}}
      datasets:
        - folder_path: "{pictures}"
          caption_ext: txt
          caption_dropout_rate: 0.05
          resolution: [64, 128]
          flip_x: true
      train:
        batch_size: 1
        gradient_accumulation_steps: 2
        steps: 4
        content_or_style: style
        train_text_encoder: true
        optimizer: adamw
        lr: 1e-4
        min_snr_gamma: 5.0
        skip_first_sample: true
        ema_config: {{use_ema: true, ema_decay: 0.9}}
      model: {{name_or_path: "{base}"}}
      sample: {{prompts: ["[trigger], a red star"], width: 64, height: 64, sample_steps: 2, sample_every: 4}}
"""


def ai_toolkit(folder: Path) -> Path:
    """Write a job of ai-toolkit for the pictures in a folder."""
    path = folder / "config.yaml"
    pictures, base = (place.as_posix() for place in (folder / "pictures", DEMO / "base"))
    path.write_text(AI_TOOLKIT.format(pictures=pictures, base=base), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("write", [onetrainer, ai_toolkit])
def test_an_imported_job_trains(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    for number in range(1, 5):
        for suffix in (".png", ".txt"):
            shutil.copy(DEMO / "pictures" / f"neon-{number:02d}{suffix}", tmp_path / "pictures")
    assert cli.main(["new", "made", "--from", str(write(tmp_path))]) == 0
    assert cli.main(["train", "made/job.toml"]) == 0
    run = RunDirectory.open(tmp_path / "made" / "runs" / "made")
    status = run.read_status()
    assert status is not None and status.step == status.steps == 2
    assert sorted((run.path / "output").glob("*.safetensors"))


SD_SCRIPTS = """
[model]
pretrained_model_name_or_path = "base.safetensors"
[data]
train_data_dir = "data"
resolution = "64,64"
enable_bucket = true
min_bucket_reso = 64
max_bucket_reso = 128
caption_extension = ".txt"
shuffle_caption = true
[network]
network_module = "networks.lora"
network_dim = 4
network_alpha = 2
network_args = ["conv_dim=2", "conv_alpha=1", "loraplus_lr_ratio=4"]
[training]
optimizer_type = "AdamW"
unet_lr = 1e-4
text_encoder_lr = 1e-5
lr_scheduler = "cosine"
lr_warmup_steps = 0.5
max_train_steps = 2
train_batch_size = 1
mixed_precision = "no"
seed = 1
min_snr_gamma = 5
output_name = "made"
save_every_n_steps = 1
"""


@pytest.mark.slow
def test_a_configuration_of_sd_scripts_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_base("sd15", tmp_path, form="single").rename(tmp_path / "base.safetensors")
    photographs(tmp_path / "data" / "2_cat", count=2)
    Path("c.toml").write_text(SD_SCRIPTS, encoding="utf-8")
    assert cli.main(["new", "made", "--from", "c.toml"]) == 0
    assert cli.main(["train", "made/job.toml"]) == 0
    (file,) = Path().rglob("output/made.safetensors")
    with safe_open(file, "pt") as lora:
        metadata = lora.metadata()
    ranks = {tensor.shape[0] for name, tensor in load_file(file).items() if name.endswith("lora_down.weight")}
    assert ranks == {2, 4}
    assert [metadata[f"ss_{key}"] for key in ("network_dim", "network_alpha", "seed", "steps")] == [
        "4",
        "2.0",
        "1",
        "2",
    ]
