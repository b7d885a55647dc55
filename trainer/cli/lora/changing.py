"""Commands that write a LoRA file made of another: convert, resize."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import words
from trainer.cli.common import Commands, add_command, echo, echo_lines, note, positive
from trainer.cli.lora.describing import add_family, add_file, add_force, require_free
from trainer.errors import EXIT_DONE, LoraFileError

if TYPE_CHECKING:
    from trainer.adapter.rewriting import LayerError

_WORST = 10
_LIMITS = {"share": (0.0, 1.0), "sum": (0.0, 1.0), "ratio": (1.0, 1e12)}
_SECONDS = 5.0  # between messages about progress


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    convert = add_command(commands, "convert", "write a LoRA file with the names of another program", run_convert)
    add_file(convert)
    convert.add_argument(
        "--to",
        required=True,
        choices=("kohya", "diffusers", "peft", "lycoris"),
        help="kohya: loads everywhere, plain LoRAs only; diffusers or peft: lora_A and lora_B; lycoris: every method",
    )
    add_out(convert)
    convert.add_argument(
        "--metadata",
        choices=("keep", "minimal"),
        default="keep",
        help="keep: all of it (default); minimal: only what programs need to load the file",
    )
    add_dtype(convert)
    add_family(convert)

    resize = add_command(commands, "resize", "write a LoRA file with fewer ranks, by SVD of each layer", run_resize)
    add_file(resize)
    add_out(resize)
    add_rank_rule(resize)
    resize.add_argument("--chart", type=Path, metavar="FILE.png", help="draw the singular values of all layers")
    add_dtype(resize)
    add_family(resize)


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the --out and --force options."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .safetensors file to write")
    add_force(parser)


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the --dtype option."""
    parser.add_argument(
        "--dtype", choices=("fp16", "bf16", "fp32"), help="number format of the output (default: that of the input)"
    )


def add_rank_rule(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the ranks of layers."""
    parser.add_argument("--rank", type=positive, help="rank of every layer, or with another criterion the highest rank")
    parser.add_argument(
        "--share", type=float, help="keep this share of each layer's norm, such as 0.95 (kohya: sv_fro)"
    )
    parser.add_argument(
        "--ratio", type=float, help="drop singular values below the largest divided by this (kohya: sv_ratio)"
    )
    parser.add_argument(
        "--sum", type=float, help="keep this share of the sum of singular values (kohya: sv_cumulative)"
    )


def run_convert(options: argparse.Namespace) -> int:
    """Convert a file."""
    require_free(options.out, options.file, force=options.force)
    from trainer.adapter.rewriting import convert

    count = convert(
        options.file,
        options.out,
        "diffusers" if options.to == "peft" else options.to,
        dtype=options.dtype,
        minimal=options.metadata == "minimal",
        family=options.family,
    )
    echo(f"{options.out}: {words.counted(count, 'layer', 'layers')}, written and read back.")
    return EXIT_DONE


def run_resize(options: argparse.Namespace) -> int:
    """Resize a file."""
    require_rule(options)
    require_free(options.out, options.file, force=options.force)
    if options.chart:
        require_free(options.chart, force=options.force, suffix=".png")
    from trainer.adapter.low_rank import RankRule
    from trainer.adapter.resizing import resize
    from trainer.cli.lora.chart import draw

    rule = RankRule(options.rank, options.share, options.ratio, options.sum)
    errors = resize(
        options.file,
        options.out,
        rule,
        dtype=options.dtype,
        family=options.family,
        progress=progress("Resized", "layers"),
    )
    echo_lines(error_table(errors))
    echo(f"{options.out}: {words.counted(len(errors), 'layer', 'layers')}, written and read back.")
    if options.chart:
        draw(errors, options.chart)
        echo(f"{options.chart}: singular values of each layer, relative to its largest.")
    return EXIT_DONE


def has_rule(options: argparse.Namespace) -> bool:
    """Return whether an option chooses ranks."""
    return any(getattr(options, name) is not None for name in ("rank", *_LIMITS))


def require_rule(options: argparse.Namespace) -> None:
    """Raise LoraFileError unless the options choose ranks, with possible values."""
    for name, (low, high) in _LIMITS.items():
        value = getattr(options, name)
        if value is not None and not low < value <= high:
            sentence = f"Could not resize: --{name} is {value:g}."
            raise LoraFileError("lora.rule", sentence, f"Use a number above {low:g}, up to {high:g}.")
    if not has_rule(options):
        sentence = "Could not resize: no option says which ranks to keep."
        raise LoraFileError("lora.rule", sentence, "Add --rank, --share, --ratio or --sum.")


def progress(what: str, units: str) -> Callable[[int, int], None]:
    """Return a callback that reports on stderr how much is done, such as "Merged 3 of 9 layers", every few seconds."""
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            note(f"{what} {done:,} of {total:,} {units}")

    return report


def error_table(errors: Sequence[LayerError]) -> Iterator[str]:
    """Yield the layers with the largest errors as a table, and the error of all together."""
    from trainer.adapter.rewriting import total_error

    worst = sorted(errors, key=lambda each: -each.error)[:_WORST]
    rows = [("LAYER", "RANK", "ERROR")]
    for each in worst:
        rank = f"{each.before} to {each.after}" if each.before is not None else str(each.after)
        rows.append((each.slot.kohya, rank, f"{each.error:.2%}"))
    yield from words.columns(rows)
    if len(errors) > len(worst):
        yield f"and {words.counted(len(errors) - len(worst), 'layer', 'layers')} with smaller errors"
    ranks = sorted(each.after for each in errors)
    mean = sum(ranks) / len(ranks)
    yield f"Ranks {ranks[0]} to {ranks[-1]}, mean {mean:.1f}; error in total {total_error(errors):.2%}"
