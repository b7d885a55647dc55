"""The commands around presets: list, show, check, share, add."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import words
from trainer.cli.arguments import Commands, add_command
from trainer.cli.jobs import machine_here
from trainer.cli.output import echo, echo_lines
from trainer.errors import EXIT_DONE, ImpastoError, JobError
from trainer.protocol import files
from trainer.protocol.printable import printable
from trainer.protocol.reading import read_text

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.presets.library import Shelved
    from trainer.config.presets.preset import Preset

_MOST_DIFFERENCES = 40


def add_commands(commands: Commands) -> None:
    """Define the words of each command."""
    parser = commands.add_parser(
        "presets", help="list, show, check, share and add presets", description="Recipes and fits as single files."
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, help="what to do with them")

    add_command(parts, "list", "list the presets at hand, your own first", run_list)

    show = add_command(parts, "show", "show a preset with the reasons for its values", run_show)
    _add_name(show)
    _add_family(show)

    check = add_command(parts, "check", "say whether a preset is sound, and what it would do here", run_check)
    _add_name(check)
    _add_family(check)
    _add_gpu(check)

    share = add_command(
        parts, "share", "write a preset as one file, without paths or anything of this machine", run_share
    )
    share.add_argument(
        "source", metavar="NAME|JOB|RUN|LORA", help="a preset, a job.toml, a run, or a LoRA file with its metadata"
    )
    _add_family(share)
    share.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .toml file to write")
    share.add_argument("--name", help="what the preset is called")
    share.add_argument("--author", help="who made it")
    share.add_argument("--licence", help="under which licence it may be used")
    share.add_argument("--notes", help="what it is good for, and what to mind")
    share.add_argument("--preview", type=Path, metavar="PICTURE", help="a picture that shows the result")
    share.add_argument("--fit", action="store_true", help="with a job or run: its fit goes along")

    add = add_command(
        parts, "add", "check a preset file, show what is different, and keep it among those received", run_add
    )
    add.add_argument("file", metavar="FILE", type=Path, help="the preset's .toml file")
    add.add_argument("--name", help="keep it under another name")
    _add_gpu(add)
    add.add_argument(
        "--yes",
        action="store_true",
        help="ask nothing, as is needed in a pipe; one of yours that it replaces is kept as a backup",
    )


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a preset's name, or its .toml file")


def _add_family(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family", choices=("sd15", "sdxl"), help="which one, where both families have one of that name"
    )


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="CARD", help='say what it costs on this card, "RTX 3060" or 8GB, not on yours')


def run_list(_options: argparse.Namespace) -> int:
    """List the presets; the fits for this machine's card are marked."""
    from trainer.config.presets.library import fit_for, read_shelf
    from trainer.files.architecture import NAMES

    shelf = read_shelf()
    memory = _card_bytes()
    here = [fit_for(shelf, family, memory) for family in NAMES] if memory else []
    rows = [
        (
            each.preset.name,
            NAMES[each.preset.base.family],
            _carries(each.preset),
            each.origin + (", for this card" if each in here else ""),
            each.preset.author,
        )
        for each in shelf.presets
    ]
    echo_lines(words.columns([("NAME", "FOR", "HOLDS", "FROM", "AUTHOR"), *rows]))
    for path, error in shelf.broken:
        echo_lines(("", f"Broken: {path}", f"  {error.sentence}", f"  What to do: {error.remedy}"))
    return EXIT_DONE


def run_show(options: argparse.Namespace) -> int:
    """Show a preset as its file says it, the picture's bytes left out."""
    from trainer.config.presets.library import find_preset

    echo_lines(_shown(find_preset(options.name, options.family)).split("\n"))
    return EXIT_DONE


def run_check(options: argparse.Namespace) -> int:
    """Read a preset; whatever is wrong with it is raised as one error that names all of it."""
    preset, path = _read(options.name, options.family)
    echo(f"{path} is a sound preset.")
    _print_preset(preset, options.gpu)
    return EXIT_DONE


def _read(name: str, family: Family | None) -> tuple[Preset, Path]:
    """Return the preset of a name or file, and its file; that of a broken one at hand is known by the file's name."""
    from trainer.config.presets.exchange import load_preset
    from trainer.config.presets.library import find_preset, read_shelf, require_family

    file = Path(name)
    if file.is_file():
        preset = load_preset(file)
        require_family(preset, family)
        return preset, file
    for path, error in read_shelf().broken:
        if path.stem.lower() == name.lower():
            raise error
    found = find_preset(name, family)
    return found.preset, found.path


def run_share(options: argparse.Namespace) -> int:
    """Write a preset file, and say what was left out."""
    from trainer.cli.sharing import preset_of
    from trainer.config.presets.making import revised
    from trainer.config.presets.preset import dump_preset

    out: Path = options.out
    if out.suffix.lower() != ".toml":
        raise JobError("preset.out", f"{out} does not end in .toml.", f"Write it to {out.name}.toml, say.")
    if out.exists():
        raise JobError("preset.exists", f"{out} exists already.", "Choose another name, or delete that file first.")
    made = preset_of(options.source, options.family, with_fit=options.fit)
    preset = revised(made.preset, _details(options))
    text = dump_preset(preset)
    files.write_text(out, text)
    echo(f"Wrote {out}, {words.size(len(text.encode('utf-8')))}.")
    echo(_summary(preset))
    _print_listed("Left out:", made.left_out)
    _print_listed("Not told, so a job's own value will stand:", made.not_found)
    return EXIT_DONE


def run_add(options: argparse.Namespace) -> int:
    """Keep a preset file among those received, once the user has seen what it changes and agreed."""
    from trainer.config.presets.exchange import load_preset
    from trainer.config.presets.library import keep_preset

    preset = load_preset(options.file)
    if options.name is not None:
        preset = _renamed(preset, options.name)
    _print_preset(preset, options.gpu)
    agreed = _agree(preset, _asks(options))
    if agreed is None:
        echo("Nothing was changed.")
        return EXIT_DONE
    path, backup = keep_preset(agreed, "received")
    echo(f'Kept "{agreed.name}" as {path}.' + (f" The one it replaces is kept as {backup}." if backup else ""))
    if agreed.recipe:
        echo(f"Use it: python -m trainer new ... --recipe {words.quoted(agreed.name)}")
    return EXIT_DONE


def _asks(options: argparse.Namespace) -> Callable[[str], str]:
    """Return a function that asks the user, answers yes for --yes, or raises JobError without a terminal."""
    if options.yes:
        return lambda _question: "yes"
    return _ask if sys.stdin.isatty() and sys.stdout.isatty() else _refuse


def _refuse(_question: str) -> str:
    raise JobError(
        "preset.unasked",
        "Could not keep the preset: there is no terminal to ask whether to keep it.",
        "Repeat the command with --yes; a preset of yours that it replaces is kept as a backup. --name keeps both.",
    )


def _ask(question: str) -> str:
    try:
        return input(question).strip()
    except EOFError:
        return ""


def _agree(preset: Preset, ask: Callable[[str], str]) -> Preset | None:
    """Return the preset as it is to be kept, perhaps under another name; None when nothing is to change.

    Raises JobError for the names of built-in presets.
    """
    from trainer.config.presets.library import compared, is_built_in, taken_by

    if is_built_in(preset):
        sentence = f'"{preset.name}" is the name of a preset that comes with Impasto.'
        raise JobError("preset.built_in", sentence, "Keep it under another name: --name OTHER.")
    former = taken_by(preset)
    if former is None:
        return preset if _is_yes(ask("Keep it? [y/N] ")) else None
    different = compared(former.preset, preset)
    if not different:
        echo("You have it already, key for key.")
        return None
    _print_listed("You have one of this name. What this one changes:", different)
    answer = ask('Replace yours (a backup is kept)? Type "y", another name for this one, or nothing to leave it: ')
    if not answer or answer.lower() in ("n", "no"):
        return None
    return preset if _is_yes(answer) else _agree(_renamed(preset, answer), ask)


def _is_yes(answer: str) -> bool:
    return answer.lower() in ("y", "yes")


def _renamed(preset: Preset, name: str) -> Preset:
    """The preset under another name; raises JobError when it cannot be a name."""
    from trainer.config.presets.making import revised

    return revised(preset, {"name": name})


def _details(options: argparse.Namespace) -> dict[str, object]:
    """What the command line says of a preset that is shared."""
    from trainer.config.presets.picture import make_picture

    told = {key: getattr(options, key) for key in ("name", "author", "licence", "notes")}
    details: dict[str, object] = {key: value for key, value in told.items() if value is not None}
    if options.preview is not None:
        details["preview"] = {"picture": make_picture(options.preview)}
    return details


def _print_preset(preset: Preset, card: str | None) -> None:
    """Say what a preset is, how it differs from a plain job, and how it will do on a card (None: that of here)."""
    from trainer.cli.outlook import outlook
    from trainer.config.presets.library import compared_with_defaults, stated_fit
    from trainer.config.recipe import RecipeConfig

    echo(_summary(preset))
    _print_listed("", preset.notes.splitlines())
    if preset.recipe:
        _print_listed("Against a job that states nothing:", compared_with_defaults(preset.recipe))
        echo_lines(outlook(preset.recipe, preset.base.family, card))
    if preset.fit:
        _print_listed("It fits by:", stated_fit(preset.fit))
    if preset.fit and not preset.recipe:
        echo("With the recipe of a job that states nothing:")
        echo_lines(outlook(RecipeConfig(), preset.base.family, card, preset.fit))


def _summary(preset: Preset) -> str:
    from trainer.files.architecture import NAMES

    parts = [
        f'"{preset.name}": {_carries(preset)} for {NAMES[preset.base.family]}',
        f"by {preset.author}" if preset.author else "",
        f"licence {preset.licence}" if preset.licence else "no licence stated",
        f"made for {preset.base.name}" if preset.base.name else "",
        f"trigger words: {', '.join(preset.trigger_words)}" if preset.trigger_words else "",
        words.counted(len(preset.examples), "example prompt", "example prompts") if preset.examples else "",
        "with a picture" if preset.preview else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def _carries(preset: Preset) -> str:
    return " and ".join(part for part in ("recipe", "fit") if getattr(preset, part) is not None)


def _shown(shelved: Shelved) -> str:
    from trainer.config.presets.preset import dump_preset

    preset = shelved.preset
    if shelved.origin == "built-in":  # its comments say more than the schema's, and nobody else has written them
        return read_text(shelved.path, "text").rstrip()
    text = dump_preset(preset.changed(preview=None)).rstrip()
    return text + ("\n\n# [preview] holds a picture." if preset.preview else "")


def _print_listed(title: str, lines: Sequence[str]) -> None:
    """Print lines from other people's files under a title."""
    if lines and title:
        echo(title)
    for line in lines[:_MOST_DIFFERENCES]:
        echo(f"  {printable(line, 300)}")
    if len(lines) > _MOST_DIFFERENCES:
        echo(f"  and {len(lines) - _MOST_DIFFERENCES} more")


def _card_bytes() -> int | None:
    """The memory of the card that jobs are planned for; None without one, or with a broken driver."""
    try:
        return machine_here().total_bytes
    except ImpastoError:
        return None
