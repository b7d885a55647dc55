"""Commands that combine LoRAs with each other or with a base, and take them apart again: merge, extract."""

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

    what = "write the difference between a base and a model tuned from it as a LoRA"
    extract = add_command(commands, "extract", what, run_extract)
    extract.add_argument(
        "original", metavar="BASE", type=Path, help="the base: a .safetensors file or diffusers folder"
    )
    extract.add_argument("tuned", metavar="TUNED", type=Path, help="the model that was tuned from it")
    add_out(extract)
    add_rank_rule(extract)
    add_dtype(extract)


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
    _require_base(options.into)
    from trainer.adapter.merging import merge_into_base

    count = merge_into_base(
        sources, options.into, options.out, dtype=options.dtype, progress=progress("Wrote", "tensors")
    )
    echo(f"{options.out}: {words.counted(count, 'layer', 'layers')} of the base changed, written and read back.")
    return EXIT_DONE


def run_extract(options: argparse.Namespace) -> int:
    """Extract a LoRA from two bases."""
    if options.rank is None:
        sentence = "Could not extract a LoRA: no option says how many ranks it may have."
        raise LoraFileError("lora.rule", sentence, "Add --rank, such as --rank 64.")
    require_rule(options)
    _require_base(options.original)
    _require_base(options.tuned)
    require_free(options.out, options.original, options.tuned, force=options.force)
    from trainer.adapter.extracting import extract
    from trainer.adapter.low_rank import RankRule

    rule = RankRule(options.rank, options.share, options.ratio, options.sum)
    report = progress("Compared", "layers")
    found = extract(options.original, options.tuned, options.out, rule, dtype=options.dtype or "fp16", progress=report)
    echo_lines(error_table(found.errors))
    if found.others:
        count = words.counted(len(found.others), "other tensor differs", "other tensors differ")
        echo(f"{count} that a LoRA cannot change, such as {found.others[0]}.")
    echo(f"{options.out}: {words.counted(len(found.errors), 'layer', 'layers')}, written and read back.")
    return EXIT_DONE


def _require_base(path: Path) -> None:
    if not path.exists():
        sentence = f"Could not read {path}: there is no such file or folder."
        raise LoraFileError("lora.base", sentence, "Choose a .safetensors checkpoint or a diffusers folder.")


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
