"""Commands that combine LoRAs with each other or with a base: merge."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from trainer.cli import words
from trainer.cli.common import Commands, add_command, echo, echo_lines
from trainer.cli.lora.changing import add_dtype, add_out, add_rank_rule, error_table, has_rule, progress, require_rule
from trainer.cli.lora.describing import add_family, require_free
from trainer.errors import EXIT_DONE, LoraFileError

_STRONGEST = 100.0


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    merge = add_command(commands, "merge", "merge LoRAs with each other, or into a base with --into", run_merge)
    merge.add_argument(
        "files", metavar="FILE=STRENGTH", nargs="+", help="a LoRA and its strength, such as style.safetensors=0.8"
    )
    merge.add_argument(
        "--into", type=Path, metavar="BASE", help="merge into this base: a .safetensors checkpoint or diffusers folder"
    )
    add_out(merge)
    add_rank_rule(merge)
    add_dtype(merge)
    add_family(merge)


def run_merge(options: argparse.Namespace) -> int:
    """Merge LoRAs into one, or into a base."""
    sources = [_source(text) for text in options.files]
    inputs = [path for path, _ in sources] + ([options.into] if options.into else [])
    require_free(options.out, *inputs, force=options.force)
    if options.into:
        return _merge_into(options, sources)
    if has_rule(options):
        require_rule(options)
    from trainer.adapter.low_rank import RankRule
    from trainer.adapter.merging import merge

    rule = RankRule(options.rank, options.share, options.ratio, options.sum) if has_rule(options) else None
    errors = merge(
        sources, options.out, rule, dtype=options.dtype, family=options.family, progress=progress("Merged", "layers")
    )
    echo_lines(error_table(errors) if errors else ["Merged exactly: the ranks of each layer add up."])
    echo(f"{options.out}: {words.counted(len(sources), 'LoRA', 'LoRAs')}, written and read back.")
    return EXIT_DONE


def _merge_into(options: argparse.Namespace, sources: list[tuple[Path, float]]) -> int:
    if has_rule(options):
        sentence = "Could not merge: options for ranks have no effect on a merge into a base."
        raise LoraFileError("lora.rule", sentence, "Leave them out, or leave out --into.")
    from trainer.adapter.merging import merge_into_base
    from trainer.config.paths import is_base_path

    if not is_base_path(str(options.into), Path.cwd()) or not options.into.exists():
        sentence = f"Could not merge into {options.into}: there is no such file or folder."
        raise LoraFileError("lora.base", sentence, "Choose a .safetensors checkpoint or a diffusers folder.")
    count = merge_into_base(
        sources, options.into, options.out, dtype=options.dtype, progress=progress("Wrote", "tensors")
    )
    echo(f"{options.out}: {words.counted(count, 'layer', 'layers')} of the base changed, written and read back.")
    return EXIT_DONE


def _source(text: str) -> tuple[Path, float]:
    """Parse FILE or FILE=STRENGTH; raises LoraFileError for a strength that is no number."""
    file, equals, stated = text.rpartition("=")
    if not equals or Path(text).exists():
        return Path(text), 1.0
    try:
        strength = float(stated)
    except ValueError:
        strength = math.nan
    if not abs(strength) <= _STRONGEST:
        sentence = f'Could not read the strength of {file}: "{stated}" is not a number from -100 to 100.'
        raise LoraFileError("lora.strength", sentence, "Write it after the equals sign, such as style.safetensors=0.8.")
    return Path(file), strength
