"""Real photographs and job files for tests that train."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import skimage
from PIL import Image

PHOTOS = Path(skimage.__file__).parent / "data"

# Mixed sizes, formats and orientations: file name, source, width, height, EXIF orientation, caption.
PICTURES = (
    ("astronaut.png", "astronaut.png", 96, 96, 1, "a portrait of an astronaut, flag"),
    ("chelsea.jpg", "chelsea.png", 128, 80, 6, "a cat, close-up, whiskers"),
    ("coffee.webp", "coffee.png", 80, 112, 1, "a cup of coffee, wooden table"),
    ("rocket.tiff", "rocket.jpg", 100, 66, 1, "a rocket, launch pad, night"),
    ("höhle 1.bmp", "hubble_deep_field.jpg", 90, 90, 1, "stars, galaxies"),
    ("camera.png", "camera.png", 72, 96, 1, "a man with a camera, black and white"),
)


def photographs(folder: Path, count: int = len(PICTURES)) -> Path:
    """Write real photographs with captions into ``folder``, small enough to train on in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source, width, height, orientation, caption in PICTURES[:count]:
        with Image.open(PHOTOS / source) as image:
            small = image.resize((width, height))
        exif = Image.Exif()
        exif[0x0112] = orientation
        small.save(folder / name, exif=exif) if orientation != 1 else small.save(folder / name)
        (folder / name).with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
    return folder


def write_job(folder: Path, base: Path, pictures: Path, name: str = "test", extra: str = "") -> Path:
    """Write a small job: six steps at 64 pixels, previews and validation on; ``extra`` TOML is appended."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.toml"
    path.write_text(
        f"""schema = 3
name = "{name}"
[base]
model = '{base}'
[[dataset.folders]]
path = '{pictures}'
trigger = "sks"
[recipe]
steps = 6
effective_batch = 3
resolution = 64
rank = 4
alpha = 2.0
learning_rate = 1e-3
images = {{bucket_step = 16, bucket_min = 32, bucket_max = 128}}
[fit]
device = "cpu"
micro_batch = 2
threads = 1
[report]
validation = {{every = 3, timesteps = [200, 800]}}
saving = {{every_steps = 2, checkpoint_every = 2}}
[report.previews]
every = 3
prompts = [{{prompt = "sks, a cat", steps = 2, width = 64, height = 64}}]
{extra}""",
        encoding="utf-8",
    )
    return path


def overrides(values: Mapping[str, object]) -> list[str]:
    """Return values as arguments of ``--set``."""
    return [f"{key}={value}" for key, value in values.items()]
