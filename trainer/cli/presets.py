"""The commands around presets: list, show, check, share, add."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli import plan_text, words
from trainer.cli.common import Commands, add_command, echo, echo_lines
from trainer.cli.jobs import family_of, machine_here
from trainer.errors import EXIT_DONE, ImpastoError, JobError, RunError
from trainer.protocol import files
from trainer.protocol.reading import read_text
from trainer.protocol.run_directory import RunDirectory, find_run
from trainer.protocol.text import printable

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.fit import FitConfig
    from trainer.config.job import Job
    from trainer.config.presets.library import PresetEntry
    from trainer.config.presets.making import CreatedPreset
    from trainer.config.presets.preset import Preset
    from trainer.config.recipe import RecipeConfig


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


def _shown(shelved: PresetEntry) -> str:
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


def outlook(recipe: RecipeConfig, family: Family, card: str | None, written: FitConfig | None = None) -> Sequence[str]:
    """Return the plan for `recipe` on `card` (a name or size; None: the card of this machine) in sentences.

    What a fit has `written` stays as it is.

    What hinders a plan is told in its place: a preset may well be kept for another machine. Raises ImpastoError for
    a card that does not exist.
    """
    return _planned(recipe, family, card, written)


def _planned(recipe: RecipeConfig, family: Family, card: str | None, written: FitConfig | None) -> Sequence[str]:
    from trainer.cli.planning import planned_for, traces_of_user
    from trainer.memory.planner.request import question_ahead, situation_of

    situation_of(card)
    try:
        question = question_ahead(family, recipe, card, fit=written)
    except ImpastoError as error:  # keys that only suit a job that states others
        return (f"By itself no job can use it: {error.sentence}",)
    if not question.situation.on_cpu:
        try:
            question.situation.require_budget()
        except ImpastoError as error:
            return (error.sentence, error.remedy)
    with traces_of_user() as traces:
        planned = planned_for(question, traces)
    situation, batch = planned.situation, question.subject.recipe.effective_batch
    if planned.pick is None:
        lighter = plan_text.what_would(planned.lighter, situation, planned.missing, batch)
        return (plan_text.nothing_fits(planned, question.written), lighter)
    sentence = plan_text.sentence(planned.pick, batch)
    return (sentence if situation.on_cpu else f"On {situation.card.name}: {sentence}", *question.remarks)


def preset_of(source: str, family: Family | None = None, *, with_fit: bool) -> CreatedPreset:
    """Make a preset of what `source` names; a job's or run's fit goes along only `with_fit`.

    `family` tells which preset, where both have one of that name.

    Raises ImpastoError when nothing has that name, or two things have, or what has it cannot be shared.
    """
    path = Path(source)
    if path.suffix.lower() == ".safetensors":
        from trainer.config.presets.making import preset_of_lora

        return preset_of_lora(path)
    if path.suffix.lower() == ".toml":
        return _of_file(path, with_fit)
    run = _run_called(source)
    made = None if path.is_dir() else _of_preset(source, family, none_is_fine=run is not None)
    if run is not None and made is not None:
        raise JobError(
            "preset.ambiguous",
            f'"{source}" is the name of a preset and of a run.',
            f"Name the run by its folder: {run.path}",
        )
    if made is not None:
        return made
    return _of_run(run or find_run(source), with_fit)


def _of_file(path: Path, with_fit: bool) -> CreatedPreset:
    from trainer.config.load import load_job
    from trainer.config.presets.exchange import load_preset
    from trainer.config.presets.making import CreatedPreset, preset_of_job

    try:
        return CreatedPreset(load_preset(path))
    except JobError as error:
        if error.code != "preset.job":
            raise
    job = load_job(path)
    family = family_of(job.base.model, None if job.base.family == "auto" else job.base.family)
    if family is None:
        sentence = f"{path.name} does not tell whether its base is SD 1.5 or SDXL."
        raise JobError("preset.no_family", sentence, 'State base.family = "sd15" or "sdxl" in it.')
    return preset_of_job(job, family, with_fit=with_fit)


def _of_preset(name: str, family: Family | None, *, none_is_fine: bool) -> CreatedPreset | None:
    from trainer.config.presets.library import find_preset
    from trainer.config.presets.making import CreatedPreset

    try:
        return CreatedPreset(find_preset(name, family).preset)
    except JobError as error:
        if error.code == "preset.unknown" and none_is_fine:
            return None
        raise


def _run_called(name: str) -> RunDirectory | None:
    """The run of that name or path; several of one name are an error, none is not."""
    try:
        return find_run(name)
    except RunError as error:
        if error.code == "run.unknown":
            return None
        raise


def _of_run(run: RunDirectory, with_fit: bool) -> CreatedPreset:
    """Of a run's frozen job, the words in its frozen listing, and the last picture of its first prompt."""
    from trainer.config.load import load_job
    from trainer.config.presets.making import preset_of_job
    from trainer.config.presets.picture import make_picture
    from trainer.dataset.dataset import read_listing

    job = load_job(run.job)
    if job.base.family == "auto":
        raise RunError("run.damaged", f"{run.job} is not frozen: it does not tell the base's family.", "Train it anew.")
    trained = [picture for picture in read_listing(run.listing) if picture.kind == "train"]
    picture = None
    if drawn := sorted(run.samples.glob("step-*-0.png")):
        with suppress(ImpastoError):  # a picture that is gone bad is no reason to keep the preset back
            picture = make_picture(drawn[-1])
    return preset_of_job(
        _as_typed(job, run),
        job.base.family,
        base_sha256=_base_sha256(run, job.base.name),
        triggers=list(dict.fromkeys(picture.trigger for picture in trained if picture.trigger)),
        picture=picture,
        with_fit=with_fit,
    )


def _as_typed(job: Job, run: RunDirectory) -> Job:
    """Return a frozen job with the recipe that the user typed, so that a length in images or epochs stays one.

    A recipe that no longer means what the run did (a run that was extended) or cannot be read is left as it is frozen.
    """
    from trainer.config.recipe import LENGTH_KEYS, RecipeConfig

    typed, first = run.read_typed(), run.attempts()[:1]
    ran = first[0].get("job") if first else None
    with suppress(ValueError):
        if typed is not None and isinstance(ran, Mapping):
            recipe = RecipeConfig.model_validate(typed)
            if ran.get("recipe.steps") != job.recipe.steps:
                kept = {key: value for key, value in typed.items() if key not in LENGTH_KEYS}
                recipe = RecipeConfig.model_validate(kept | {"steps": job.recipe.steps})
            return job.changed(recipe=recipe)
    return job


def _base_sha256(run: RunDirectory, name: str) -> str | None:
    """The hash of the base as the last attempt found its files; None where it tells none."""
    from trainer.config.presets.making import hash_of_base

    attempts = run.attempts()
    files = attempts[-1].get("base") if attempts else None
    if not isinstance(files, Mapping):
        return None
    return hash_of_base({path: digest for path, digest in files.items() if isinstance(digest, str)}, name)
