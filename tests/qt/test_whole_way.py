"""The whole way of an artist, in one window and with real engines: from a folder of pictures to a LoRA that loads."""

import subprocess
import sys

import pytest

from tests.support import tool_homes
from tests.support.artist import PATIENCE, Sitting, neon, until
from trainer.protocol.run_directory import RunDirectory

LOADS = """
import sys
from trainer.base.imports import quick_imports
with quick_imports():
    from diffusers import StableDiffusionPipeline
pipeline = StableDiffusionPipeline.from_pretrained(sys.argv[1], local_files_only=True)
pipeline.load_lora_weights(sys.argv[2], adapter_name="neon")
assert pipeline.get_list_adapters()["unet"] == ["neon"]
"""


@pytest.fixture
def sittings(qtbot):
    """Begins sittings, each with a window of its own; those that a failure leaves open are ended."""
    begun = []

    def begin() -> Sitting:
        begun.append(Sitting())
        return begun[-1]

    yield begin
    for sitting in begun:
        sitting.end()


def test_from_pictures_to_a_lora_that_loads(sittings, tmp_path, monkeypatch):
    tool_homes.comfy_portable(tmp_path / "tools", tmp_path / "elsewhere")
    monkeypatch.setenv("IMPASTO_LOOK_IN", str(tmp_path / "tools"))
    wish = neon(tmp_path)
    sitting = sittings()
    sitting.artist.open_images(wish.pictures)
    sitting.artist.set_up(wish)
    run = sitting.artist.start()
    page = sitting.artist.watch(run)
    until(lambda: page.run.summary.step >= 2, 120, "two steps")
    sitting.end()

    sitting = sittings()  # "Training continues": everything is there again
    artist = sitting.artist
    train = artist.train
    until(lambda: train.draft is not None, PATIENCE, "the job that was open last")
    assert train.sheet.essentials.trigger.text() == wish.trigger
    page = artist.watch(run)
    until(lambda: page.run.summary.state == "done" and page.run.loaded, 240, "the end of the run")
    assert list(page.samples.samples.steps) == [0, 6, 12]
    assert len(page.run.series.loss) == wish.steps
    lora = artist.send_to_comfy(page)
    sitting.end()

    assert "ComfyUI" in lora.parts
    directory = RunDirectory.open(run)
    assert directory.state() == "done"
    subprocess.run([sys.executable, "-c", LOADS, wish.base, lora], check=True, capture_output=True)
