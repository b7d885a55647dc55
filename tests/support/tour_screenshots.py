"""Take the screenshots of the README's tour from the app itself.

    python -m tests.support.tour_screenshots docs/tour

A simulated user goes through the whole workflow on the demo base, with real engines and a temporary home folder; each
page is photographed on the way. Takes about six minutes on two cores, without a GPU.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from PySide6.QtWidgets import QApplication

from app.core.planning.forecaster import REFERENCE_GPU
from app.core.runs.series import CellIndex
from app.qt.lora_viewer import LoraViewer
from app.qt.presets.page import PresetsPage
from app.qt.runs.page import RunsPage
from app.qt.theme import Theme
from app.qt.widgets import install_language
from tests.support import ROOT, tool_homes
from tests.support.artist import Artist, Sitting, TrainingRequest, shown_page, until
from trainer.files.assets import asset_path

SIZE = (1280, 800)
STEPS, EVERY = 300, 60
"""The demo's length and preview interval: six columns of samples fill the page."""
LIVE = 210
"""The step at which the run is photographed while it is training."""
SIDE = 124
CARD = "8GB"
"""The GPU that the presets are planned for."""
TRIED = "neontube, a green moon above a red mushroom on a white background"

Shoot = Callable[[str], None]


def move_in(home: Path) -> TrainingRequest:
    """Set up a home folder with a base, images and ComfyUI, and return the training request.

    Its path is shown starting with "~", so that no real user's folders appear in the screenshots.
    """
    os.environ.pop("IMPASTO_CACHE", None)
    os.environ |= {name: str(home) for name in ("HOME", "USERPROFILE")}
    os.environ |= {"IMPASTO_HOME": str(home / "Impasto"), "IMPASTO_LOOK_IN": str(home / "Programs")}
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    shutil.copytree(asset_path("demo", "base"), home / "Models" / "demo")
    shutil.copytree(asset_path("demo", "pictures"), home / "Pictures" / "Neon")
    tool_homes.comfy_portable(home / "Programs", home / "Elsewhere")
    return TrainingRequest(
        base=Path("~/Models/demo"),
        pictures=home / "Pictures" / "Neon",
        recipe="Style",
        trigger="neontube",
        steps=STEPS,
        prompts=(
            "neontube, a red fish on a yellow background",
            "neontube, a yellow heart on a blue background",
            "neontube, a purple moon on a white background",
        ),
        settings={  # what assets/demo/job.toml sets for a base as small as this
            "recipe.resolution": "128",
            "recipe.rank": "16",
            "recipe.alpha": "16",
            "recipe.learning_rate": "0.0015",
            "recipe.captions.dropout": "0",
            "recipe.objective.min_snr_gamma": "",
            "recipe.objective.debiased_estimation": "true",
            "recipe.objective.noise_offset": "0.25",
            "dataset.validation_share": "0.2",
            "fit.threads": "1",
            "report.validation.every": str(EVERY),
            "report.saving.every_steps": str(EVERY),
            "report.previews.every": str(EVERY),
        },
        prompt_settings={"width": "128", "height": "128", "guidance": "2"},
    )


def look_at_images(artist: Artist, request: TrainingRequest) -> None:
    """Open the folder, and select one of its images."""
    session = artist.session
    drawn: set[int] = set()
    session.thumbnails.ready.connect(lambda thumbnail: drawn.add(thumbnail.image))
    artist.open_images(request.pictures)
    until(lambda: len(session.view.ids) > 1 and len(drawn) >= min(12, len(session.view.ids)), 60, "thumbnails")
    chosen = session.view.ids[1]
    session.view.select([chosen], chosen)
    until(
        lambda: session.health.current_findings and session.health.current_progress()[:2] == (0, 0),
        60,
        "facts about the images",
    )


def set_up(artist: Artist, request: TrainingRequest) -> None:
    """Set up the job and wait for its forecast on a given GPU; then show only the essentials."""
    artist.set_up(request)
    page = artist.train
    page.sheet.search.clear()
    page.sheet.all.setChecked(False)
    for row in page.sheet.essentials.prompts.rows:
        row.more.setChecked(False)
    box, forecaster = page.forecast.chooser.box, page.forecast.forecaster
    box.setCurrentIndex(box.findData(REFERENCE_GPU))
    box.activated.emit(box.currentIndex())
    until(lambda: forecaster.state == "done" and not forecaster.stale, 240, "the forecast")
    if focused := QApplication.focusWidget():
        focused.clearFocus()
    page.sheet.verticalScrollBar().setValue(0)


def watch_live(artist: Artist, run: Path) -> RunsPage:
    """Watch the curves of a training run."""
    page = artist.watch(run)
    page.tabs.setCurrentWidget(page.progress)
    until(lambda: page.run is not None and page.run.summary.step >= LIVE, 600, f"step {LIVE}")
    until(lambda: page.progress.board is not None and not page.progress.board._waiting, 20, "the charts")
    return page


def look_at_samples(page: RunsPage) -> None:
    """Show all samples, with that of the best step selected."""
    matrix = page.samples
    page.tabs.setCurrentWidget(matrix)
    matrix.grid.set_side(SIDE)
    samples = matrix.samples
    assert samples is not None
    matrix.grid.go(CellIndex(STEPS, 0))
    pictures = [matrix.grid.image(spot) for spot in matrix.grid.seen()]
    thumbnails, edge = page.session.thumbnails, matrix.grid._edge()
    until(lambda: all(one is not None and thumbnails.get(one, edge) for one in pictures), 30, "the samples")


def try_out(artist: Artist, page: RunsPage) -> None:
    """Compare the candidates side by side, and render something else with the best of them."""
    after = page.after
    page.tabs.setCurrentWidget(after)
    found, trying = after.strip.candidates, after.trying
    until(lambda: any(each.last for each in found.all), 30, "the candidates")
    after.strip.choose(next(place for place, each in enumerate(found.all) if each.best))
    until(lambda: all(found.image(each) for each in found.all), 30, "their images")
    trying.prompt.setPlainText(TRIED)
    artist.click(trying.render_button)
    until(lambda: trying.image.shows and not trying.is_drawing(), 180, "the test image")
    until(lambda: after.send_button.isVisible(), 30, "a folder to send to")


def make_preset(artist: Artist, lora: Path) -> None:
    """Make a recipe from the LoRA, and wait for the cost of each visible recipe."""
    window = artist.window
    window.show_lora(lora)
    viewer = window.findChild(LoraViewer)
    until(viewer.recipe.isEnabled, 30, "what the LoRA says of itself")
    artist.click(viewer.recipe)
    until(lambda: window.pages.currentIndex() == 3, 30, "the Presets page")
    page = shown_page(window, PresetsPage)
    viewer.close()
    until(lambda: page.chosen is not None and page.chosen.origin == "yours", 30, "the preset that was made")
    artist.session.presets.cost_estimates.choose(CARD)
    known = page.list.cards.outlook
    until(lambda: all(known(each) is not None for each in page.list.visible_cards()), 300, "what presets cost")


def go(artist: Artist, request: TrainingRequest, shoot: Shoot, theme: Theme) -> None:
    """Go through the whole workflow, from the images to a preset for others."""
    look_at_images(artist, request)
    shoot("images")
    set_up(artist, request)
    shoot("train")
    page = watch_live(artist, artist.start())
    shoot("runs")
    artist.see_through(page)
    theme.choose("dark")
    look_at_samples(page)
    shoot("samples")
    theme.choose("light")
    try_out(artist, page)
    shoot("after")
    make_preset(artist, artist.send_to_comfy(page))
    shoot("presets")


def photograph(sitting: Sitting, target: Path) -> None:
    """Save the window as it is shown, without its notices."""
    for bar in tuple(sitting.window.notices._bars):
        sitting.window.notices._remove(bar)
    QApplication.processEvents()
    sitting.window.grab().save(str(target))
    with Image.open(target) as picture:
        seen = picture.convert("RGB")
    seen.save(target, optimize=True)  # no palette: samples have more colors than it would hold


def main(target: Path) -> None:
    """Take all screenshots of the tour."""
    target = target.absolute()
    target.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    # Processes that the window started end after it, and may still hold a file.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        request = move_in(Path(place))
        application = QApplication([])
        install_language(application, "en")
        theme = Theme(application, "light")
        sitting = Sitting()
        sitting.window.resize(*SIZE)
        try:
            go(sitting.artist, request, lambda name: photograph(sitting, target / f"{name}.png"), theme)
        finally:
            sitting.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
