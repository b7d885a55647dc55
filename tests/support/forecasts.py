"""Job files whose plans need no tracing, because their traces ship with Impasto."""

from __future__ import annotations

from pathlib import Path

from trainer.config.base import Family
from trainer.files.assets import asset_path

_JOB = """
schema = 3
name = "Kätzchen"

[base]
model = "nowhere.safetensors"
family = "{family}"

[dataset]
folders = [{{ path = "pictures" }}]

{recipe}

[[report.previews.prompts]]
prompt = "a cat"

[[report.previews.prompts]]
prompt = "a cat on a sofa"
"""


def known_job(folder: Path, family: Family) -> Path:
    """Write a job with the recipe of the built-in style preset, on a base and images that do not exist."""
    preset = (asset_path("traces").parents[1] / "presets" / "recipes" / f"{family}-style.toml").read_text("utf-8")
    folder.mkdir(parents=True)
    path = folder / "job.toml"
    path.write_text(_JOB.format(family=family, recipe=preset[preset.index("[recipe]") :]), encoding="utf-8")
    return path
