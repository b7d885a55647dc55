"""Demo that trains a real LoRA on the bundled base and renders the same prompts with and without it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from trainer.config.base import BaseConfig
from trainer.config.job import PromptConfig
from trainer.config.write import demo_job
from trainer.errors import EXIT_DONE, ResumableError
from trainer.files.assets import asset_path
from trainer.protocol import events, files
from trainer.protocol.reading import read_toml
from trainer.protocol.run_directory import RunDirectory
from trainer.render.renderer import LoraUse, Renderer
from trainer.training.device.out_of_memory import gpu_guard
from trainer.training.reporting.reporter import OnEvent
from trainer.training.run.start import start

SCALE = 2
COLUMNS = 6
GAP = 12
LABEL_HEIGHT = 90
TITLE_WIDTH = 130
LETTERS_PER_LINE = 30
SHEET = "before-and-after.png"
PAPER, INK, FAINT = "#f6f4f0", "#22201d", "#8a857c"


@dataclass(frozen=True, slots=True)
class SheetRow:
    """Row of same-size images, one per prompt."""

    title: str
    images: Sequence[Image.Image]


def draw_sheet(rows: Sequence[SheetRow], prompts: Sequence[str], inside: int) -> Image.Image:
    """Return a sheet with the rows' images and the prompts below them, in bands of up to COLUMNS prompts.

    The first ``inside`` prompts are from the dataset.
    """
    bands = []
    for first in range(0, len(prompts), COLUMNS):
        columns = slice(first, first + COLUMNS)
        band_rows = [SheetRow(row.title, row.images[columns]) for row in rows]
        bands.append(draw_band(band_rows, prompts[columns], inside - first))
    size = (bands[0].width, sum(band.height for band in bands))
    sheet = Image.new("RGB", size, PAPER)
    for number, band in enumerate(bands):
        sheet.paste(band, (0, number * bands[0].height))
    return sheet


def draw_band(rows: Sequence[SheetRow], prompts: Sequence[str], inside: int) -> Image.Image:
    """Return one band of the sheet, with a column per prompt, the rows below each other, and prompts at the bottom."""
    side = rows[0].images[0].width * SCALE
    columns = len(prompts)
    size = (TITLE_WIDTH + columns * (side + GAP) + GAP, GAP + len(rows) * (side + GAP) + LABEL_HEIGHT)
    sheet = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(sheet)
    small, large = ImageFont.load_default(15), ImageFont.load_default(19)
    for line, row in enumerate(rows):
        top = GAP + line * (side + GAP)
        pen.text((GAP, top + side // 2 - 10), row.title, INK, large)
        for column, image in enumerate(row.images):
            enlarged = image.resize((side, side), Image.Resampling.LANCZOS)
            sheet.paste(enlarged, (TITLE_WIDTH + GAP + column * (side + GAP), top))
    top = GAP + len(rows) * (side + GAP)
    for column, prompt in enumerate(prompts):
        left = TITLE_WIDTH + GAP + column * (side + GAP)
        pen.text((left, top), "in the dataset" if column < inside else "new", FAINT, small)
        pen.multiline_text((left, top + 20), "\n".join(textwrap.wrap(prompt, LETTERS_PER_LINE)), INK, small)
    return sheet


def style_statistic(image: Image.Image) -> float:
    """Return the darkness of an RGB image from 0 (white) to 1 (black): 1 - mean luminance (ITU-R 601-2)."""
    return 1.0 - float(np.asarray(image.convert("L"), dtype=np.float64).mean()) / 255.0


def mean_statistic(images: Sequence[Image.Image]) -> float:
    """Return the mean `style_statistic` of the images."""
    return float(np.mean([style_statistic(image) for image in images]))


def style_progress(
    base_images: Sequence[Image.Image],
    lora_images: Sequence[Image.Image],
    dataset_images: Sequence[Image.Image],
) -> float:
    """Return how far the LoRA moves images from the base's darkness (0) toward that of the dataset (1).

    The value is (lora - base) / (dataset - base), computed from the mean statistics.
    """
    base, lora, dataset = map(mean_statistic, (base_images, lora_images, dataset_images))
    return (lora - base) / (dataset - base)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of the demo."""

    run: Path
    lora: Path
    sheet: Path
    style: float
    """`style_progress` for prompts outside the dataset, from 0 (like the base) to 1 (like the dataset)."""
    held_out_before: float
    held_out_after: float

    @property
    def held_out_fall(self) -> float:
        """Return the relative decrease of the validation loss."""
        return 1 - self.held_out_after / self.held_out_before


def run(folder: Path, on_event: OnEvent) -> DemoResult:
    """Train the demo job in ``folder`` and save a comparison sheet there; raise ImpastoError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.toml"
    files.write_text(job, demo_job())
    existing = set((folder / "runs").glob("*"))
    code = start(job, [], on_event)
    (created,) = set((folder / "runs").glob("*")) - existing
    finished = RunDirectory.open(created)
    if code != EXIT_DONE:
        raise ResumableError(
            "demo.stopped",
            f"The demo was stopped before its LoRA was finished; the run is {created}.",
            f"Continue it with `python -m trainer resume {created}`, or start the demo again.",
        )
    lora = finished.output / "neon.safetensors"
    sheet, style = compare(lora, folder / SHEET)
    before, after = validation_losses(finished)
    return DemoResult(finished.path, lora, sheet, style, before, after)


def prompts() -> Mapping[str, Any]:
    """Return the trigger word, prompts from the dataset, prompts outside the dataset, and the sampling settings."""
    return read_toml(asset_path("demo", "prompts.toml"), "config")


def compare(lora: Path, sheet: Path) -> tuple[Path, float]:
    """Render every prompt with and without the LoRA from the same noise; return the sheet and style progress."""
    words = prompts()
    inside, outside = list(words["inside"]), list(words["outside"])
    with gpu_guard("render the demo's images"):
        before = draw(inside + outside, [])
        after = draw([f"{words['trigger']}, {text}" for text in inside + outside], [LoraUse(lora)])
    rows = [SheetRow("base", before), SheetRow("base + LoRA", after)]
    draw_sheet(rows, inside + outside, len(inside)).save(sheet)
    return sheet, style_progress(before[len(inside) :], after[len(inside) :], dataset_images())


def draw(texts: Sequence[str], loras: Sequence[LoraUse]) -> list[Image.Image]:
    """Render one image per prompt with the bundled base and ``loras``; the seed is the prompt's index."""
    base = BaseConfig(model=str(asset_path("demo", "base")))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    renderer = Renderer(
        base, loras, device=device, dtype=torch.float32, clip_skip=None, progress=None, on_notice=lambda *_: None
    )
    drawing = prompts()["drawing"]
    side = drawing["size"]
    settings = [
        PromptConfig(prompt=text, seed=seed, steps=drawing["steps"], guidance=drawing["guidance"])
        for seed, text in enumerate(texts)
    ]
    return [renderer.render(prompt, side, side) for prompt in settings]


def dataset_images() -> list[Image.Image]:
    """Return the demo's training images."""
    return [Image.open(path).convert("RGB") for path in sorted(asset_path("demo", "pictures").glob("*.png"))]


def validation_losses(finished: RunDirectory) -> tuple[float, float]:
    """Return the validation loss at the start and at the end of a run."""
    written, _ = events.read_events(finished.events)
    losses = [event.loss for event in written if isinstance(event, events.Validation) and event.loss is not None]
    return losses[0], losses[-1]
