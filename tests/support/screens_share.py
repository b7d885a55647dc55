"""Screens of the Presets page and the LoRA viewer."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from PySide6.QtWidgets import QApplication, QWidget
from safetensors.numpy import save_file

from app.qt.lora_viewer import LoraViewer
from app.qt.presets.dialogs import EditDialog, ReceiveDialog, VersionsDialog
from app.qt.presets.page import PresetsPage
from app.qt.window import Window
from tests.support.artist import shown_page
from tests.support.screens import DEMO, screen, wait
from trainer.config.presets import library
from trainer.config.presets.creating import revised
from trainer.config.presets.preset import dump_preset
from trainer.config.presets.preview_image import make_preview

_NOTES = "Soft gouache landscapes. Made with 60 images; captions describe the content but not the medium."


def shown_presets(window: Window) -> PresetsPage:
    """Show the page with a few of the user's own presets and some from others."""
    _keep_some()
    window.show_presets()
    page = shown_page(window, PresetsPage)
    window.session.presets.reload()
    wait(QApplication.instance(), lambda: len(page.list.cards.rows) > 4 and len(page.list.painter.images) > 1)
    page.choose(next(each.path for each in page.list.cards.rows if each.preset.name == "soft gouache"))
    return page


def _keep_some() -> None:
    if any(each.origin == "yours" for each in library.read_library().presets):
        return
    pictures = sorted(path for path in DEMO.rglob("*.png"))
    built_in = library.find_preset("style", "sdxl").preset
    mine = revised(built_in, {"name": "soft gouache", "author": "Zoë", "license": "CC-BY-4.0", "notes": _NOTES})
    mine = revised(mine, {"preview": {"image": make_preview(pictures[0])}, "trigger_words": ("gch", "soft light")})
    path, _ = library.save_preset(mine)
    library.rewrite_preset(path, revised(mine, {"notes": "Soft gouache landscapes."}))
    library.rewrite_preset(path, mine)
    theirs = revised(
        library.find_preset("character", "sd15").preset, {"name": "mika", "author": "Ana", "notes": "A face."}
    )
    library.save_preset(revised(theirs, {"preview": {"image": make_preview(pictures[1])}}), "received")


@screen("presets")
def presets(window: Window) -> QWidget:
    page = shown_presets(window)
    chosen = page.chosen
    assert chosen is not None
    window.session.presets.cost_estimates.choose("8GB")
    wait(QApplication.instance(), lambda: page.list.cards.outlook(chosen) is not None, 120_000)
    return window


@screen("presets-arriving")
def arriving(window: Window) -> QWidget:
    page = shown_presets(window)
    sent = library.find_preset("soft gouache").preset
    changes = {"rank": 16, "alpha": 8.0, "steps": 1200, "images_seen": None}
    recipe = sent.recipe.replaced(**changes) if sent.recipe else None
    folder = Path(tempfile.mkdtemp())
    path = folder / "soft gouache.toml"
    path.write_text(dump_preset(sent.replaced(recipe=recipe)), encoding="utf-8")
    page.open(path)
    wait(QApplication.instance(), lambda: page.arriving is not None)
    dialog, outlooks = page.arriving, window.session.presets.cost_estimates
    assert isinstance(dialog, ReceiveDialog)
    received = dialog.received
    outlooks.choose("8GB")
    wait(QApplication.instance(), lambda: outlooks.of(received.file, received.preset) is not None, 120_000)
    return dialog


@screen("presets-edit")
def edit(window: Window) -> QWidget:
    page = shown_presets(window)
    assert page.chosen is not None
    return EditDialog(window.session, page.chosen, window)


@screen("presets-versions")
def versions(window: Window) -> QWidget:
    page = shown_presets(window)
    assert page.chosen is not None
    dialog = VersionsDialog(window.session, page.chosen, window)
    wait(QApplication.instance(), lambda: bool(dialog.past))
    return dialog


@screen("lora")
def lora(window: Window) -> QWidget:
    path = some_lora(Path(tempfile.mkdtemp()))
    viewer = LoraViewer(window.session, path, window)
    wait(QApplication.instance(), lambda: bool(viewer.blocks.lines.rows))
    return viewer


@screen("lora-tags")
def lora_tags(window: Window) -> QWidget:
    viewer = lora(window)
    assert isinstance(viewer, LoraViewer)
    viewer.tabs.setCurrentWidget(viewer.tags)
    return viewer


def some_lora(folder: Path) -> Path:
    """Write an SDXL LoRA as kohya's programs do, with a layer in each block and an image beside it."""
    places = [f"input_blocks_{n}_1" for n in (4, 5, 7, 8)] + ["middle_block_1"]
    places += [f"output_blocks_{n}_1" for n in range(6)]
    random, tensors = np.random.default_rng(3), {}
    names = [f"lora_unet_{place}_transformer_blocks_0_attn2_to_k" for place in places]
    for number, name in enumerate([*names, "lora_te1_text_model_encoder_layers_0_mlp_fc1"]):
        width = 768 if "te1" in name else 2048
        tensors[f"{name}.lora_down.weight"] = random.standard_normal((16, width)).astype(np.float16)
        tensors[f"{name}.lora_up.weight"] = (random.standard_normal((640, 16)) * (1 + number % 5) / 99).astype(
            np.float16
        )
        tensors[f"{name}.alpha"] = np.array(8.0, np.float32)
    tags = {"gch": 60, "landscape": 41, "tree": 33, "river": 20, "house": 12, "soft light": 9, "boat": 3}
    metadata = {
        "modelspec.title": "Soft gouache", "modelspec.author": "Zoë", "modelspec.license": "CC-BY-4.0",
        "modelspec.trigger_phrase": "gch", "modelspec.description": _NOTES,
        "ss_sd_model_name": "sd_xl_base_1.0.safetensors",
        "ss_network_dim": "16", "ss_network_alpha": "8", "ss_unet_lr": "0.0001", "ss_optimizer": "AdamW8bit",
        "ss_max_train_steps": "1500", "ss_resolution": "(1024, 1024)", "ss_seed": "42",
        "ss_tag_frequency": json.dumps({"10_gch": tags}),
    }  # fmt: skip
    path = folder / "soft gouache.safetensors"
    save_file(tensors, path, metadata)
    with Image.open(sorted(DEMO.rglob("*.png"))[0]) as picture:
        picture.convert("RGB").save(path.with_suffix(".png"))
    return path
