"""Draws for a program that stays: JSON lines in, JSON lines out, with the base kept in memory from one to the next.

What trainer/protocol/processes.py says of requests holds. One names a base as a job does, and pictures to draw:

    {"id": 1, "base": {"model": "base.safetensors"}, "out": "folder", "pictures": [
        {"loras": [{"file": "style.safetensors", "strength": 0.8}], "prompt": {"prompt": "a cat", "seed": 7}}]}

``clip_skip`` and ``device`` may stand beside them. A grid of checkpoints, strengths and prompts is a request of many
pictures; those with the same LoRAs should follow each other, for changing them takes a moment. Answers:

    {"id": 1, "state": "loading", "device": "cuda:0", "phase": "load", "done": 3, "total": 686}
                                                                               of the base, in the units of the phase
    {"id": 1, "state": "notice", "code": "lora.unmatched", "sentence": "..."}  to be known, but no hindrance
    {"id": 1, "state": "drawing", "picture": 0, "step": 4, "steps": 20}        the picture by its place in the request
    {"id": 1, "state": "drawn", "picture": 0, "file": "folder/000.png"}
    {"id": 1, "state": "done"}

The next request cancels the one before within a step of drawing; what was drawn stays. Two draw nothing:

    {"id": 2, "do": "cancel"}    only that
    {"id": 3, "do": "free"}      the base is given up as well, and with it the card

The base is also given up when nothing was asked for a while. As long as it lies on a card, no training starts there.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TextIO

import torch
from pydantic import Field, ValidationError

from trainer.config.base import BaseConfig
from trainer.config.fit import FitConfig
from trainer.config.job import PromptConfig
from trainer.config.problems import problems
from trainer.config.recipe import RecipeConfig
from trainer.config.schema import Section
from trainer.errors import ImpastoError, RunError
from trainer.protocol import locks
from trainer.protocol.events import Phase
from trainer.protocol.places import write_remedy
from trainer.protocol.processes import Answer, OvertakenError, Request, Server, Turn
from trainer.render.renderer import LoraUse, OnNotice, Renderer, drawing_dtype
from trainer.training.device.device import this_machine
from trainer.training.device.out_of_memory import is_out_of_memory, memory_full

IDLE_SECONDS = 120.0
_TELL_SECONDS = 0.1  # progress more often than this would be noise


class LoraRequest(Section):
    """A LoRA in a request."""

    file: str = Field(min_length=1)
    """Where it lies."""
    strength: float = Field(default=1.0, ge=-100.0, le=100.0)
    """1: as trained."""


class PictureRequest(Section):
    """A picture in a request."""

    loras: tuple[LoraRequest, ...] = Field(default=(), strict=False)
    """What it is drawn with."""
    prompt: PromptConfig
    """What it shows, and how it is drawn."""


class RenderRequest(Section):
    """What to draw."""

    id: str | int
    """Of the asker's."""
    base: BaseConfig
    """As in a job; paths are absolute or relative to the folder of this process."""
    out: str = Field(min_length=1)
    """The folder to draw into."""
    pictures: tuple[PictureRequest, ...] = Field(min_length=1, max_length=10_000, strict=False)
    """In the order in which they are drawn."""
    clip_skip: int | None = None
    """As in a recipe."""
    device: str | None = None
    """As in a fit."""


class FreeRequest(Section):
    """What draws nothing."""

    id: str | int
    do: Literal["cancel", "free"]


def render_server(output: TextIO, idle: float = IDLE_SECONDS) -> Server:
    """Return a server that draws; it gives its base up after `idle` seconds without a request."""
    service = RenderService()
    return Server(
        service.work,
        fault,
        output,
        code="render.request",
        guide="trainer/render/serve.py",
        idle=idle,
        on_idle=service.free,
    )


def fault(request: Request) -> str | None:
    """Say what is wrong with a request; None when nothing is."""
    if "do" in request:
        return _faults(FreeRequest, request)
    said = _faults(RenderRequest, request)
    return (
        said
        or _faults(FitConfig, {"device": request.get("device")})
        or _faults(RecipeConfig, {"clip_skip": request.get("clip_skip")})
    )


def _faults(section: type[Section], values: Request) -> str | None:
    try:
        section.model_validate(values)
    except ValidationError as error:
        return "; ".join(problems(error, section))
    return None


class RenderService:
    """Keeps one base in memory, and its card for itself as long as it lies there."""

    def __init__(self) -> None:
        self._renderer: Renderer | None = None
        self._loaded: tuple[BaseConfig, torch.device] | None = None
        self._card = contextlib.ExitStack()

    def work(self, turn: Turn) -> Answer:
        """Do what a request says; raises ImpastoError."""
        if "do" in turn.request:
            if turn.request["do"] == "free":
                self.free()
            return {}
        asked = RenderRequest.model_validate(turn.request)
        try:
            self._draw(asked, turn)
            return {}
        except (OvertakenError, ImpastoError):
            raise
        except OSError as error:
            raise _not_written(asked.out, error) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            full = memory_full(error, "draw the image")
        # Only here is the error gone, and with its frames everything that the failed work had allocated.
        self.free()
        raise RunError("render.memory", full.sentence, f"Choose a smaller size, or: {full.remedy}")

    def free(self) -> None:
        """Give up base and card."""
        self._renderer = self._loaded = None
        gc.collect()  # PEFT's layers and their models refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._card.close()

    def _draw(self, asked: RenderRequest, turn: Turn) -> None:
        renderer = self._renderer_for(asked, turn)
        folder = Path(asked.out)
        folder.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(asked.pictures):
            turn.go_on()
            renderer.use(_uses(picture))

            def on_step(step: int, steps: int, number: int = number) -> None:
                turn.go_on()
                turn.tell("drawing", picture=number, step=step, steps=steps)

            file = renderer.draw_file(picture.prompt, folder, on_step)
            turn.tell("drawn", picture=number, file=str(file))

    def _renderer_for(self, asked: RenderRequest, turn: Turn) -> Renderer:
        """The base that is asked for, loaded unless it lies here."""
        machine = this_machine(asked.device)
        device = torch.device(machine.device)
        if self._renderer is None or self._loaded != (asked.base, device):
            self.free()
            try:
                self._occupy(device)
                self._renderer = Renderer(
                    asked.base,
                    _uses(asked.pictures[0]),
                    device=device,
                    dtype=drawing_dtype(machine),
                    clip_skip=asked.clip_skip,
                    progress=_progress(turn, device),
                    on_notice=_notices(turn),
                )
            except BaseException:
                self.free()
                raise
            self._loaded = asked.base, device
        self._renderer.clip_skip = asked.clip_skip
        self._renderer.on_notice = _notices(turn)
        return self._renderer

    def _occupy(self, device: torch.device) -> None:
        """Hold the lane of a card; on the CPU drawing only makes a training slower. Raises RunError while one runs."""
        if device.type == "cpu":
            return
        try:
            self._card.enter_context(locks.occupied(str(device), locks.ASKED))
        except locks.LockBusyError:
            raise RunError(
                "render.busy",
                "A training is under way on this graphics card, and there is no room for both.",
                "Wait until it is done, or pause it: pausing frees the card.",
            ) from None


def _uses(picture: PictureRequest) -> list[LoraUse]:
    return [LoraUse(Path(lora.file), lora.strength) for lora in picture.loras]


def _notices(turn: Turn) -> OnNotice:
    return lambda code, sentence: turn.tell("notice", code=code, sentence=sentence)


def _progress(turn: Turn, device: torch.device) -> Callable[[Phase, int, int], None]:
    """Tell of loading. A download ends for another request; loading does not: what is loaded is likely wanted next."""
    last = 0.0

    def tell(phase: Phase, done: int, total: int) -> None:
        nonlocal last
        if phase == "download":
            turn.go_on()
        if done >= total or time.monotonic() - last >= _TELL_SECONDS:
            last = time.monotonic()
            turn.tell("loading", device=str(device), phase=phase, done=done, total=total)

    return tell


def _not_written(folder: str, error: OSError) -> RunError:
    return RunError(
        "render.folder",
        f"The pictures cannot be written into {folder}: {error.strerror or error}.",
        write_remedy(error),
    )
