"""The resident renderer, as its own process: what it draws is what `render` draws, cells of a grid included."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.loras import EVERYTHING, Models, random_weights
from tests.support.tiny import tiny_base
from trainer.adapter.export import export_lora
from trainer.config.base import BaseConfig
from trainer.config.job import PromptConfig
from trainer.errors import RunError
from trainer.protocol import locks
from trainer.render.renderer import LoraUse, render
from trainer.render.serve import RenderService, request_error

SIZE = {"width": 64, "height": 64, "steps": 3, "guidance": 4.0}


class Asked:
    """A renderer of its own process, and its answers one by one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def send(self, **request: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def until(self, *states: str) -> list[dict[str, Any]]:
        """All answers up to the first of these states, that one last."""
        assert self.process.stdout
        said = []
        for line in self.process.stdout:
            said.append(json.loads(line))
            if said[-1]["state"] in states:
                return said
            assert said[-1]["state"] != "error", said[-1]  # no other answer follows
        raise AssertionError(f"it ended after {said}")


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """LoRAs that show: two of the same ranks, as two steps of a run, and one of another."""
    folder = tmp_path_factory.mktemp("loras é")
    made = []
    for number, rank in enumerate((4, 4, 2)):
        adapter = Models.copies("sd15", torch.float32).attach(EVERYTHING.model_copy(update={"rank": rank}))
        weights = {name: tensor * (number + 1) for name, tensor in random_weights(adapter).items()}
        made.append(folder / f"{number}.safetensors")
        export_lora(made[-1], weights, adapter, {})
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base("sd15", tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with subprocess.Popen(
        [sys.executable, "-m", "trainer", "render", "--serve"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
    ) as process:  # fmt: skip
        yield Asked(process)
        assert process.stdin and process.stderr and process.stdout
        process.stdin.close()  # the end of the input ends it
        assert process.stdout.read() == "" and process.stderr.read() == ""
    assert process.returncode == 0


def pixels(file: str | Path) -> np.ndarray:
    with Image.open(file) as picture:
        return np.asarray(picture)


def picture(prompt: str, *loras: tuple[Path, float], **settings: Any) -> dict[str, Any]:
    used = [{"file": str(file), "strength": strength} for file, strength in loras]
    return {"loras": used, "prompt": {"prompt": prompt, "seed": 7, **SIZE, **settings}}


def test_each_cell_of_a_grid_is_the_picture_that_render_draws(
    asked: Asked, base: Path, loras: list[Path], tmp_path: Path
) -> None:
    first, second, other = loras
    cat, dog = "a red cat", "a blue dog"
    cells = [(cat, (first, 0.5)), (cat, (first, 1.0)), (dog, (second, 1.0)), (cat, (other, 1.0)), (dog, (first, 1.0))]
    grid = [picture(prompt, use) for prompt, use in cells]
    asked.send(id="é", base={"model": str(base)}, out=str(tmp_path / "grid"), clip_skip=2, images=grid)
    said = asked.until("done")
    assert {answer["id"] for answer in said} == {"é"}
    assert [answer["state"] for answer in said if answer["state"] != "loading"][:4] == ["rendering"] * 3 + ["rendered"]
    drawn = [answer for answer in said if answer["state"] == "rendered"]
    assert [answer["image"] for answer in drawn] == list(range(len(cells)))
    found = [pixels(answer["file"]) for answer in drawn]
    for number, (prompt, (file, strength)) in enumerate(cells):
        (alone,) = render(
            BaseConfig(model=str(base)),
            [LoraUse(file, strength)],
            [PromptConfig(prompt=prompt, seed=7, **SIZE)],  # type: ignore[arg-type]
            tmp_path / "alone",
            device=torch.device("cpu"),
            dtype=torch.float32,
            clip_skip=2,
            on_drawn=lambda *_: None,
            on_notice=lambda *_: None,
        )
        assert np.array_equal(found[number], pixels(alone)), (prompt, file.name, strength)
    assert len({array.tobytes() for array in found}) == len(cells), "every cell is another picture"


def test_the_base_is_loaded_once_and_again_when_it_was_freed(asked: Asked, base: Path, tmp_path: Path) -> None:
    request = {"base": {"model": str(base)}, "out": str(tmp_path), "images": [picture("a cat")]}
    asked.send(id=1, **request)
    asked.until("done")
    asked.send(id=2, **request)
    assert "loading" not in {answer["state"] for answer in asked.until("done")}
    asked.send(id=3, do="free")
    assert asked.until("done") == [{"id": 3, "state": "done"}]
    asked.send(id=4, **request)
    assert "loading" in {answer["state"] for answer in asked.until("done")}
    first, *others = (pixels(file) for file in sorted(tmp_path.glob("*.png")))
    assert len(others) == 2 and all(np.array_equal(first, other) for other in others)


def test_a_request_is_cancelled_by_the_next_within_a_step(asked: Asked, base: Path, tmp_path: Path) -> None:
    long = [picture("a cat", steps=1000), picture("a dog")]
    asked.send(id=1, base={"model": str(base)}, out=str(tmp_path), images=long)
    asked.until("rendering")
    asked.send(id=2, do="cancel")
    said = asked.until("done")
    assert said[-1] == {"id": 2, "state": "done"} and said[-2] == {"id": 1, "state": "cancelled"}
    assert not list(tmp_path.iterdir())
    asked.send(id=3, base={"model": str(base)}, out=str(tmp_path), images=[picture("a dog")])
    assert asked.until("rendered", "error")[-1]["state"] == "rendered"
    asked.until("done")


def test_what_cannot_be_drawn_is_said_in_words_and_the_next_is_drawn(
    asked: Asked, base: Path, loras: list[Path], tmp_path: Path
) -> None:
    good: dict[str, Any] = {"base": {"model": str(base)}, "out": str(tmp_path / "a"), "images": [picture("a cat")]}
    (tmp_path / "file").write_text("x")
    for change, part in (
        ({"base": {"model": str(tmp_path / "nowhere.safetensors")}}, "does not exist"),
        ({"images": [picture("a", (tmp_path / "nowhere.safetensors", 1.0))]}, "does not exist"),
        ({"images": [picture("a", width=100)]}, "images.0.prompt.width"),
        ({"images": []}, "images"),
        ({"clip_skip": 99}, "clip_skip"),
        ({"device": "gpu"}, "device"),
        ({"device": "cuda:9"}, "this GPU"),
        ({"paint": 1}, "paint"),
        ({"out": str(tmp_path / "file" / "in")}, "Could not write"),
    ):
        asked.send(id=5, **{**good, **change})
        (answer,) = [one for one in asked.until("error", "done") if one["state"] != "loading"]
        assert answer["state"] == "error" and part in answer["sentence"] and answer["remedy"], change
    asked.send(id=6, **good)
    assert asked.until("done", "error")[-1]["state"] == "done"


def test_a_card_with_a_training_on_it_is_left_alone_and_a_held_one_is_given_back() -> None:
    service, card = RenderService(), torch.device("cuda:3")
    with locks.hold_lane("cuda:3"), pytest.raises(RunError, match="run is training"):
        service._lock_gpu(card)
    service._lock_gpu(card)
    assert locks.is_lane_held("cuda:3")
    service.free()
    assert not locks.is_lane_held("cuda:3")


def test_requests_are_checked() -> None:
    assert request_error({"id": 1, "do": "cancel"}) is None
    assert "do" in str(request_error({"id": 1, "do": "dance"}))
    assert request_error({"id": 1, "base": {"model": "a"}, "out": "b", "images": [picture("a")]}) is None
