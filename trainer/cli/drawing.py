"""Commands that generate images: `render` uses a base and LoRAs, and `demo` trains the demo's LoRA first."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.common import Commands, add_base, add_command, add_json, checked, echo, engine_imports
from trainer.cli.jobs import showing_events
from trainer.config.methods import SAMPLERS
from trainer.errors import EXIT_DONE, LoraFileError, RunError

if TYPE_CHECKING:
    from trainer.config.base import BaseConfig
    from trainer.config.job import PromptConfig


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    render = add_command(commands, "render", "generate images with a base and finished LoRAs", run_render)
    add_base(render, required=False)
    render.add_argument("--prompt", action="append", default=[], help="the prompt; repeatable")
    render.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:STRENGTH]",
        help="a LoRA, such as style.safetensors:0.8; repeatable",
    )
    render.add_argument("--negative", default="", help="the negative prompt")
    render.add_argument("--width", type=int, help="width in pixels (default 512 for SD 1.5, 1024 for SDXL)")
    render.add_argument("--height", type=int, help="height in pixels (default 512 for SD 1.5, 1024 for SDXL)")
    render.add_argument("--seed", type=int, default=1, help="seed of the initial noise (default 1)")
    render.add_argument("--steps", type=int, default=20, help="denoising steps (default 20)")
    render.add_argument("--guidance", type=float, default=7.0, help="classifier-free guidance, CFG scale (default 7)")
    samplers = f"{', '.join(SAMPLERS[:-1])} or {SAMPLERS[-1]} (default euler)"
    render.add_argument("--sampler", default="euler", help=samplers)
    render.add_argument(
        "--prompt-weights",
        action=argparse.BooleanOptionalAction,
        help=r"read (word:1.3), (word) and [word] as weights, but not \(word\) (default: if a LoRA was trained so)",
    )
    render.add_argument(
        "--clip-skip",
        type=int,
        help="text encoder layer, counted from the end as in kohya: 1 is the last; SD 1.5 only",
    )
    render.add_argument("--device", help="cpu, cuda or cuda:1 (default: the best GPU, else the CPU)")
    render.add_argument("--out", type=Path, default=Path("images"), help="the output folder (default: images)")
    render.add_argument("--serve", action="store_true", help="render requests read as JSON lines from stdin")
    render.set_defaults(refuse=render.error)

    what = "train a small LoRA on the bundled base and show images before and after"
    demo = add_command(commands, "demo", what, run_demo)
    demo.add_argument("--out", type=Path, default=Path("demo"), help="the folder for the demo's job, run and image")
    add_json(demo)


def run_render(options: argparse.Namespace) -> int:
    """Render every prompt and print the file names; with --serve, answer requests until stdin ends."""
    if options.serve:
        from trainer.base.imports import quick_imports

        with quick_imports():
            from trainer.render.serve import render_server
        render_server(sys.stdout).run(sys.stdin)
        return EXIT_DONE
    if not options.base or not options.prompt:
        options.refuse("the following arguments are required: --base and --prompt, or --serve")
    base, prompts = _what_to_draw(options)
    loras = [_lora(text) for text in options.lora]
    _require_files(base, [file for file, _ in loras], options.out)
    render_images(
        base,
        prompts,
        options.out,
        loras=loras,
        device=options.device,
        clip_skip=options.clip_skip,
        on_drawn=lambda done, total, file: echo(str(file)),
    )
    return EXIT_DONE


def render_images(
    base: BaseConfig,
    prompts: Sequence[PromptConfig],
    out: Path,
    *,
    loras: Sequence[tuple[Path, float]] = (),
    device: str | None = None,
    clip_skip: int | None = None,
    on_drawn: Callable[[int, int, Path], None],
) -> None:
    """Render every prompt into ``out`` as the next free 000.png, 001.png, etc., showing progress on stderr."""
    from trainer.cli.display import open_display

    with open_display(sys.stderr, as_json=False) as show:
        with engine_imports(show):
            import torch

            from trainer.render.renderer import LoraUse, drawing_dtype, render
            from trainer.training.device.device import this_machine
            from trainer.training.device.out_of_memory import gpu_guard
            from trainer.training.reporting.reporter import Reporter

        machine = this_machine(device)
        with Reporter(show) as reporter, gpu_guard("render the image"):
            render(
                base,
                [LoraUse(file, strength) for file, strength in loras],
                prompts,
                out,
                device=torch.device(machine.device),
                dtype=drawing_dtype(machine),
                on_drawn=on_drawn,
                clip_skip=clip_skip,
                progress=reporter.phase,
                on_notice=reporter.notice,
            )


def base_at(model: str) -> BaseConfig:
    """Return the base that an argument names: a path relative to the current folder, a Hub id or a link."""
    from trainer.config.base import BaseConfig
    from trainer.config.paths import absolute, is_base_path

    here = Path.cwd()
    return checked(BaseConfig, model=absolute(model, here) if is_base_path(model, here) else model)


def _what_to_draw(options: argparse.Namespace) -> tuple[BaseConfig, list[PromptConfig]]:
    """Return the base and the prompts as job settings.

    Raises a JobError that names every invalid value of a section.
    """
    from trainer.config.fit import FitConfig
    from trainer.config.job import PromptConfig
    from trainer.config.recipe import RecipeConfig

    keys = ("negative", "width", "height", "seed", "steps", "guidance", "sampler")
    settings = {key: getattr(options, key) for key in keys}
    checked(FitConfig, device=options.device)
    checked(RecipeConfig, clip_skip=options.clip_skip)
    return base_at(options.base), [
        checked(PromptConfig, prompt=text, weights=options.prompt_weights, **settings) for text in options.prompt
    ]


def _require_files(base: BaseConfig, loras: Sequence[Path], out: Path) -> None:
    """Raise ImpastoError, before the engine starts, if a file cannot be used or `out` cannot be written."""
    from trainer.config.paths import is_base_path
    from trainer.files.architecture import NAMES
    from trainer.files.identify import identify_base, identify_lora
    from trainer.protocol.places import unwritable, write_remedy

    family = None
    if is_base_path(base.model, Path.cwd()):
        if not Path(base.model).exists():
            from trainer.base.fetch import fetch_base

            fetch_base(base.model)  # raises an error that says what is missing
        family = identify_base(Path(base.model)).family
    for file in loras:
        identity = identify_lora(file)
        if family and identity.family and identity.family != family:
            made_for = NAMES[identity.family]
            sentence = f"Could not use {file}: it was made for {made_for}, but the base is {NAMES[family]}."
            raise LoraFileError("lora.family", sentence, "Choose a base and a LoRA of the same family.")
    if error := unwritable(out):
        sentence = f"Could not write images to {out}: {error.strerror or error}."
        raise RunError("render.folder", sentence, write_remedy(error))


def _lora(text: str) -> tuple[Path, float]:
    """Parse FILE or FILE:STRENGTH into path and strength; the colon after a Windows drive belongs to the path."""
    file, _, stated = text.rpartition(":")
    if not file or Path(text).exists():
        return Path(text), 1.0
    try:
        strength = float(stated)
    except ValueError:
        if not Path(file).is_file():
            return Path(text), 1.0
        strength = math.nan
    if not math.isfinite(strength):
        sentence = f'Could not read the strength of {file}: "{stated}" is not a number.'
        raise LoraFileError("lora.strength", sentence, "Write it after the colon, such as style.safetensors:0.8.")
    return Path(file), strength


def run_demo(options: argparse.Namespace) -> int:
    """Train the demo's LoRA and print where the results are."""
    with showing_events(as_json=options.json) as on_event:
        with engine_imports(on_event):
            from trainer import demo

        result = demo.run(options.out, on_event)
    if not options.json:
        echo(f"Before and after: {result.sheet}")
        echo(f"LoRA: {result.lora}")
        echo(f"Images of subjects outside the dataset moved {result.style:.0%} of the way to its style.")
        echo(f"Validation loss (on images held out of training) fell by {result.held_out_fall:.0%}.")
    return EXIT_DONE
