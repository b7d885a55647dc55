"""The demo's job, as `python run.py demo` and the app's tour train it."""

from __future__ import annotations

from pathlib import Path

from trainer.config.write import toml_value
from trainer.files.assets import asset_path


def demo_job(pictures: Path | None = None) -> str:
    """Return the demo job's text with the bundled base, and with the bundled pictures or a copy of them."""
    template = asset_path("demo", "job.toml").read_text(encoding="utf-8")
    base, place = (
        toml_value(str(asset_path("demo", "base"))),
        toml_value(str(pictures or asset_path("demo", "pictures"))),
    )
    return template.replace("@BASE@", base).replace("@PICTURES@", place)
