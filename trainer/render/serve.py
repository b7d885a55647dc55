"""Render server: JSON lines in, JSON lines out, with the base kept in memory between requests.

trainer/protocol/processes.py describes requests in general. A render request names a base, as in a job, and images:

    {"id": 1, "base": {"model": "base.safetensors"}, "out": "folder", "images": [
        {"loras": [{"file": "style.safetensors", "strength": 0.8}], "prompt": {"prompt": "a cat", "seed": 7}}]}

``clip_skip`` and ``device`` are optional. A grid of checkpoints, strengths and prompts is a request with many images;
group images with the same LoRAs, because switching LoRAs takes a moment. Answers:

    {"id": 1, "state": "loading", "device": "cuda:0", "phase": "load", "done": 3, "total": 686}
                                                                               progress, in the phase's unit
    {"id": 1, "state": "notice", "code": "lora.unmatched", "sentence": "..."}  information, not an error
    {"id": 1, "state": "rendering", "image": 0, "step": 4, "steps": 20}        index of the image in the request
    {"id": 1, "state": "rendered", "image": 0, "file": "folder/000.png"}
    {"id": 1, "state": "done"}

A new request cancels the current one within a sampling step; finished images stay. Two requests render nothing:

    {"id": 2, "do": "cancel"}    only cancels
    {"id": 3, "do": "free"}      also unloads the base and frees the GPU

The base is also unloaded when no request arrives for a while. While it is on a GPU, no training starts there.
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
from trainer.protocol.processes import ActiveRequest, Answer, Request, Server, SupersededError
from trainer.render.renderer import LoraUse, OnNotice, Renderer, drawing_dtype
from trainer.training.device.device import this_machine
from trainer.training.device.out_of_memory import is_out_of_memory, oom_error

IDLE_SECONDS = 120.0
_REPORT_SECONDS = 0.1  # shortest interval between progress messages


class LoraRequest(Section):
    """LoRA to apply to a requested image."""

    file: str = Field(min_length=1)
    """Path of the file."""
    strength: float = Field(default=1.0, ge=-100.0, le=100.0)
    """Strength to apply it with; 1: as trained."""


class ImageRequest(Section):
    """One image of a request."""

    loras: tuple[LoraRequest, ...] = Field(default=(), strict=False)
    """LoRAs to apply."""
    prompt: PromptConfig
    """Prompt and sampling settings."""


class RenderRequest(Section):
    """Request to render images."""

    id: str | int
    """Id chosen by the client, repeated in every answer."""
    base: BaseConfig
    """Base, as in a job; paths are absolute or relative to this process's working directory."""
    out: str = Field(min_length=1)
    """Output folder."""
    images: tuple[ImageRequest, ...] = Field(min_length=1, max_length=10_000, strict=False)
    """Images, rendered in this order."""
    clip_skip: int | None = None
    """Clip skip, as in a recipe."""
    device: str | None = None
    """Device, as in fit settings."""


class FreeRequest(Section):
    """Request that cancels rendering and, with "free", also frees the GPU."""

    id: str | int
    do: Literal["cancel", "free"]


def render_server(output: TextIO, idle: float = IDLE_SECONDS) -> Server:
    """Return a render server that unloads its base after `idle` seconds without a request."""
    service = RenderService()
    return Server(
        service.work,
        request_error,
        output,
        code="render.request",
        guide="trainer/render/serve.py",
        idle=idle,
        on_idle=service.free,
    )


def request_error(request: Request) -> str | None:
    """Return a description of what is wrong with a request; None if it is valid."""
    if "do" in request:
        return _faults(FreeRequest, request)
    problem = _faults(RenderRequest, request)
    return (
        problem
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
    """Keeps one base in memory; while it is on a GPU, holds that GPU's lock so that no training starts."""

    def __init__(self) -> None:
        self._renderer: Renderer | None = None
        self._loaded: tuple[BaseConfig, torch.device] | None = None
        self._gpu_lock = contextlib.ExitStack()

    def work(self, turn: ActiveRequest) -> Answer:
        """Execute a request and return an empty answer; raise ImpastoError if it fails."""
        if "do" in turn.request:
            if turn.request["do"] == "free":
                self.free()
            return {}
        request = RenderRequest.model_validate(turn.request)
        try:
            self._render(request, turn)
            return {}
        except (SupersededError, ImpastoError):
            raise
        except OSError as error:
            raise _not_written(request.out, error) from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            full = oom_error(error, "render the image")
        # After the except block: until then the traceback's frames keep everything that the failed work allocated.
        self.free()
        raise RunError("render.memory", full.sentence, f"Choose a smaller size, or free memory first. {full.remedy}")

    def free(self) -> None:
        """Unload the base and release the GPU."""
        self._renderer = self._loaded = None
        gc.collect()  # PEFT's layers and their models form reference cycles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._gpu_lock.close()

    def _render(self, request: RenderRequest, turn: ActiveRequest) -> None:
        renderer = self._renderer_for(request, turn)
        folder = Path(request.out)
        folder.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(request.images):
            turn.raise_if_overtaken()
            renderer.use(_uses(image))

            def on_step(step: int, steps: int, number: int = number) -> None:
                turn.raise_if_overtaken()
                turn.report_progress("rendering", image=number, step=step, steps=steps)

            file = renderer.render_file(image.prompt, folder, on_step)
            turn.report_progress("rendered", image=number, file=str(file))

    def _renderer_for(self, request: RenderRequest, turn: ActiveRequest) -> Renderer:
        """Return a renderer with the requested base, which is loaded unless it is already in memory."""
        machine = this_machine(request.device)
        device = torch.device(machine.device)
        if self._renderer is None or self._loaded != (request.base, device):
            self.free()
            try:
                self._lock_gpu(device)
                self._renderer = Renderer(
                    request.base,
                    _uses(request.images[0]),
                    device=device,
                    dtype=drawing_dtype(machine),
                    clip_skip=request.clip_skip,
                    progress=_progress(turn, device),
                    on_notice=_notices(turn),
                )
            except BaseException:
                self.free()
                raise
            self._loaded = request.base, device
        self._renderer.configure(clip_skip=request.clip_skip, on_notice=_notices(turn))
        return self._renderer

    def _lock_gpu(self, device: torch.device) -> None:
        """Lock a GPU; raises RunError if a run is training on it.

        The CPU is not locked, because rendering on it only makes training slower.
        """
        if device.type == "cpu":
            return
        try:
            self._gpu_lock.enter_context(locks.hold_lane(str(device), locks.CHECK_PATIENCE))
        except locks.LockBusyError:
            raise RunError(
                "render.busy",
                "Could not load the base: a run is training on this GPU, and there is not enough memory for both.",
                "Wait until it has finished, or pause it to free the GPU.",
            ) from None


def _uses(image: ImageRequest) -> list[LoraUse]:
    return [LoraUse(Path(lora.file), lora.strength) for lora in image.loras]


def _notices(turn: ActiveRequest) -> OnNotice:
    return lambda code, sentence: turn.report_progress("notice", code=code, sentence=sentence)


def _progress(turn: ActiveRequest, device: torch.device) -> Callable[[Phase, int, int], None]:
    """Return a callback that reports loading progress.

    A new request cancels a download, but not loading, because the next request probably needs the same base.
    """
    last = 0.0

    def report(phase: Phase, done: int, total: int) -> None:
        nonlocal last
        if phase == "download":
            turn.raise_if_overtaken()
        if done >= total or time.monotonic() - last >= _REPORT_SECONDS:
            last = time.monotonic()
            turn.report_progress("loading", device=str(device), phase=phase, done=done, total=total)

    return report


def _not_written(folder: str, error: OSError) -> RunError:
    return RunError(
        "render.folder",
        f"Could not write images to {folder}: {error.strerror or error}.",
        write_remedy(error),
    )
