"""A run's header with its samples, two of them compared, and its log."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageFilter
from PySide6.QtWidgets import QApplication, QWidget

from app.core.runs.series import CellIndex
from app.qt.runs.page import RunsPage
from app.qt.window import Window
from tests.support.artist import shown_page
from tests.support.screens import DEMO, screen, wait
from tests.support.written_runs import RunWriter, held, new_run
from trainer.protocol import events, places

_STEPS = range(0, 1001, 100)
_SIZE = 320


def _drawn(engine: RunWriter, pictures: list[Path], step: int) -> None:
    """Write previews as they might look at a step: photographs that become sharper."""
    for index, source in enumerate(pictures):
        with Image.open(source) as image:
            clear = image.convert("RGB").resize((_SIZE, _SIZE))
        file = engine.run.samples / f"step-{step:08d}-{index}.png"
        clear.filter(ImageFilter.GaussianBlur(max(0.0, 16 - step / 45))).save(file)
        engine.tell(events.Preview(step=step, index=index, file=f"samples/{file.name}", seconds=2.0))


def _told(engine: RunWriter) -> None:
    for phase, total, seconds in (("load", 1, 14.0), ("check", 24, 1.0), ("cache_pictures", 24, 9.0)):
        engine.tell(events.PhaseStarted(phase=phase, total=total), events.PhaseFinished(phase=phase, seconds=seconds))
    engine.tell(events.PhaseStarted(phase="train", total=1200))
    rates = {"unet": 1e-4}
    engine.tell(
        events.StepEvent(step=1000, epoch=40, loss=0.1, grad_norm=0.2, learning_rates=rates, images=4, seconds=1.3)
    )
    pictures = sorted(path for path in DEMO.iterdir() if path.suffix in (".jpg", ".png", ".webp"))[:3]
    for step in _STEPS:
        _drawn(engine, pictures, step)
        loss = 0.11 + abs(step - 700) / 9000
        engine.tell(events.Validation(step=step, loss=loss, held_out=True, per_timestep={}))
        if step % 200 == 0 and step:
            engine.save(step)
    engine.tell(
        events.Notice(code="base", sentence="SD 1.5, epsilon prediction, one file."),
        events.Skipped(step=412, reason="loss"),
        events.MemoryExhausted(
            phase="train", step=640, requested=400 << 20, stage="backward", module="unet.up_blocks.1",
            allocated=8 << 30, reserved=9 << 30, forecast=8 << 30,
        ),
        events.SteppedDown(step=640, fallback=1, changes={"micro_batch": 1}, exact=True),
    )  # fmt: skip
    lines = (f"step {step}  loss {0.1 + 1 / (step + 9):.4f}" for step in range(1, 1001))
    engine.run.console.write_text("Loading the base\n" + "\n".join(lines) + "\n", encoding="utf-8")
    engine.stand("paused", 1000)


def _page(window: Window, tab: str) -> RunsPage:
    """Show the run with one of its tabs; write the run on the first call."""
    folder = places.home() / "screens"
    run = folder / "a cat of mine"
    if not run.is_dir():
        with held(new_run(folder, run.name, steps=1200), steps=1200) as engine:
            _told(engine)
    window.show_runs()
    page = shown_page(window, RunsPage)
    page.open(run)
    wait(QApplication.instance(), lambda: page.run is not None and page.run.directory.path == run and page.run.loaded)
    page.tabs.setCurrentWidget(getattr(page, tab))
    return page


@screen("run-samples")
def samples(window: Window) -> QWidget:
    matrix = _page(window, "samples").samples
    matrix.show_grid()
    matrix.grid.go(CellIndex(700, 0))
    pictures = [matrix.grid.image(spot) for spot in matrix.grid.seen()]
    made, edge = window.session.thumbnails, matrix.grid._edge()
    wait(QApplication.instance(), lambda: all(made.get(one, edge) for one in pictures))
    return window


@screen("run-compare")
def compare(window: Window) -> QWidget:
    matrix = _page(window, "samples").samples
    matrix.grid.go(CellIndex(900, 1))
    matrix.show_compare()
    stage = matrix.compare.stage
    wait(QApplication.instance(), lambda: stage.first.whole is not None and stage.second.whole is not None)
    return window


@screen("run-log")
def log(window: Window) -> QWidget:
    view = _page(window, "log").log
    wait(QApplication.instance(), lambda: bool(view.text.toPlainText()) and bool(view.remarks.texts))
    return window
