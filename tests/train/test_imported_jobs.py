"""A job that was made from another trainer's file trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.jobs import photographs
from tests.support.tiny import tiny_base
from trainer import cli

CONFIG = """
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
    Path("c.toml").write_text(CONFIG, encoding="utf-8")
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
