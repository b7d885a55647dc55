"""Commands for presets: list, show, check, share, add."""

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
    from trainer.config.presets.creating import CreatedPreset
    from trainer.config.presets.library import PresetEntry
    from trainer.config.presets.preset import Preset
    from trainer.config.recipe import RecipeConfig


_MOST_DIFFERENCES = 40


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    parser = commands.add_parser(
        "presets",
        help="list, show, check, share and add presets",
        description="Manage presets: shareable recipes and fits.",
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, help="what to do")

    add_command(parts, "list", "list all presets, your own first", run_list)

    show = add_command(parts, "show", "show a preset with the reasons for its values", run_show)
    _add_name(show)
    _add_family(show)

    check = add_command(parts, "check", "check that a preset is valid and show what it needs on this PC", run_check)
    _add_name(check)
    _add_family(check)
    _add_gpu(check)

    share = add_command(parts, "share", "write a preset file without paths and other data from this PC", run_share)
    share.add_argument(
        "source", metavar="NAME|JOB|RUN|LORA", help="a preset, a job.toml, a run, or a LoRA file with its metadata"
    )
    _add_family(share)
    share.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .toml file to write")
    share.add_argument("--name", help="the preset's name")
    share.add_argument("--author", help="the preset's author")
    share.add_argument("--license", help="the license under which it may be used")
    share.add_argument("--notes", help="what it is good for, and what to watch out for")
    share.add_argument("--preview", type=Path, metavar="IMAGE", help="an image that shows the result")
    share.add_argument("--fit", action="store_true", help="with a job or run: include its fit")

    add = add_command(parts, "add", "check a preset file, show what it changes, and add it to your presets", run_add)
    add.add_argument("file", metavar="FILE", type=Path, help="the preset's .toml file")
    add.add_argument("--name", help="add it under another name")
    _add_gpu(add)
    add.add_argument(
        "--yes",
        action="store_true",
        help="add it without asking (required without a terminal); a replaced preset is backed up",
    )


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a preset's name, or its .toml file")


def _add_family(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family", choices=("sd15", "sdxl"), help="the base family, if both have a preset of this name"
    )


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", metavar="GPU", help='plan for this GPU, such as "RTX 3060" or 8GB (default: the one in this PC)'
    )


def run_list(_options: argparse.Namespace) -> int:
    """List the presets, and mark the fit presets for this PC's GPU."""
    from trainer.config.presets.library import fit_for, read_library
    from trainer.files.architecture import NAMES

    library = read_library()
    memory = _gpu_bytes()
    here = [fit_for(library, family, memory) for family in NAMES] if memory else []
    rows = [
        (
            each.preset.name,
            NAMES[each.preset.base.family],
            _carries(each.preset),
            each.origin + (", for this GPU" if each in here else ""),
            each.preset.author,
        )
        for each in library.presets
    ]
    echo_lines(words.columns([("NAME", "FOR", "HOLDS", "FROM", "AUTHOR"), *rows]))
    for path, error in library.broken:
        echo_lines(("", f"Broken: {path}", f"  {error.sentence}", f"  What to do: {error.remedy}"))
    return EXIT_DONE


def run_show(options: argparse.Namespace) -> int:
    """Show a preset's text without the bytes of its preview image."""
    from trainer.config.presets.library import find_preset

    echo_lines(_text_of(find_preset(options.name, options.family)).split("\n"))
    return EXIT_DONE


def run_check(options: argparse.Namespace) -> int:
    """Read a preset and print what it does; raise a single error that lists all problems."""
    preset, path = _read(options.name, options.family)
    echo(f"{path} is a valid preset.")
    _print_preset(preset, options.gpu)
    return EXIT_DONE


def _read(name: str, family: Family | None) -> tuple[Preset, Path]:
    """Return the preset with this name or file, and its path.

    If the library has a damaged preset file with this name, raises the error that occurred when it was read.
    """
    from trainer.config.presets.exchange import load_preset
    from trainer.config.presets.library import find_preset, read_library, require_family

    file = Path(name)
    if file.is_file():
        preset = load_preset(file)
        require_family(preset, family)
        return preset, file
    for path, error in read_library().broken:
        if path.stem.lower() == name.lower():
            raise error
    found = find_preset(name, family)
    return found.preset, found.path


def run_share(options: argparse.Namespace) -> int:
    """Write a preset file and print what was left out."""
    from trainer.config.presets.creating import revised
    from trainer.config.presets.preset import dump_preset

    out: Path = options.out
    if out.suffix.lower() != ".toml":
        sentence = f"Could not write {out}: its name does not end in .toml."
        raise JobError("preset.out", sentence, f"Use --out {words.quoted(f'{out.name}.toml')}, for example.")
    if out.exists():
        sentence = f"Could not write {out}: the file already exists."
        raise JobError("preset.exists", sentence, "Choose another name, or delete that file first.")
    made = preset_of(options.source, options.family, with_fit=options.fit)
    preset = revised(made.preset, _details(options))
    text = dump_preset(preset)
    files.write_text(out, text)
    echo(f"Wrote {out}, {words.size(len(text.encode('utf-8')))}.")
    echo(_summary(preset))
    _print_listed("Left out:", made.left_out)
    _print_listed("Not found, so a job keeps its own value:", made.not_found)
    return EXIT_DONE


def run_add(options: argparse.Namespace) -> int:
    """Add a preset file to the user's presets after showing what it changes and asking for confirmation."""
    from trainer.config.presets.exchange import load_preset
    from trainer.config.presets.library import save_preset

    preset = load_preset(options.file)
    if options.name is not None:
        preset = _renamed(preset, options.name)
    _print_preset(preset, options.gpu)
    agreed = _agree(preset, _asks(options))
    if agreed is None:
        echo("Nothing changed.")
        return EXIT_DONE
    path, backup = save_preset(agreed, "received")
    echo(f'Added "{agreed.name}" as {path}.' + (f" The replaced preset was backed up as {backup}." if backup else ""))
    if agreed.recipe:
        echo(f"Use it: python -m trainer new ... --recipe {words.quoted(agreed.name)}")
    return EXIT_DONE


def _asks(options: argparse.Namespace) -> Callable[[str], str]:
    """Return a function that asks the user; with --yes, it returns "yes"; without a terminal, it raises JobError."""
    if options.yes:
        return lambda _question: "yes"
    return _ask if sys.stdin.isatty() and sys.stdout.isatty() else _refuse


def _refuse(_question: str) -> str:
    raise JobError(
        "preset.unasked",
        "Could not add the preset: there is no terminal to ask for confirmation.",
        "Repeat the command with --yes; a preset that gets replaced is backed up. To keep both, use --name.",
    )


def _ask(request: str) -> str:
    try:
        return input(request).strip()
    except EOFError:
        return ""


def _agree(preset: Preset, ask: Callable[[str], str]) -> Preset | None:
    """Return the preset to add, perhaps under another name; None if the user declines or nothing would change.

    Raises JobError if a built-in preset has this name.
    """
    from trainer.config.presets.library import compared, is_built_in, preset_with_same_name

    if is_built_in(preset):
        sentence = f'Could not add "{preset.name}": a preset that comes with Impasto has this name.'
        raise JobError("preset.built_in", sentence, "Add it under another name: --name OTHER.")
    former = preset_with_same_name(preset)
    if former is None:
        return preset if _is_yes(ask("Add it? [y/N] ")) else None
    different = compared(former.preset, preset)
    if not different:
        echo("You already have this preset; nothing differs.")
        return None
    _print_listed("You already have a preset of this name. The new one changes:", different)
    answer = ask('Replace yours (it is backed up)? Type "y", another name for the new one, or Enter to cancel: ')
    if not answer or answer.lower() in ("n", "no"):
        return None
    return preset if _is_yes(answer) else _agree(_renamed(preset, answer), ask)


def _is_yes(answer: str) -> bool:
    return answer.lower() in ("y", "yes")


def _renamed(preset: Preset, name: str) -> Preset:
    """Return the preset under another name; raises JobError if the name is invalid."""
    from trainer.config.presets.creating import revised

    return revised(preset, {"name": name})


def _details(options: argparse.Namespace) -> dict[str, object]:
    """Return the details given on the command line: any of name, author, license, notes and preview."""
    from trainer.config.presets.preview_image import make_preview

    given = {key: getattr(options, key) for key in ("name", "author", "license", "notes")}
    details: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    if options.preview is not None:
        details["preview"] = {"image": make_preview(options.preview)}
    return details


def _print_preset(preset: Preset, gpu: str | None) -> None:
    """Print what a preset is, how it differs from the defaults, and the plan for it on a GPU (None: this PC's)."""
    from trainer.config.presets.library import compared_with_defaults, stated_fit
    from trainer.config.recipe import RecipeConfig

    echo(_summary(preset))
    _print_listed("", preset.notes.splitlines())
    if preset.recipe:
        _print_listed("Settings that differ from the defaults:", compared_with_defaults(preset.recipe))
        echo_lines(outlook(preset.recipe, preset.base.family, gpu))
    if preset.fit:
        _print_listed("Its fit:", stated_fit(preset.fit))
    if preset.fit and not preset.recipe:
        echo("With the default recipe:")
        echo_lines(outlook(RecipeConfig(), preset.base.family, gpu, preset.fit))


def _summary(preset: Preset) -> str:
    from trainer.files.architecture import NAMES

    parts = [
        f'"{preset.name}": {_carries(preset)} for {NAMES[preset.base.family]}',
        f"by {preset.author}" if preset.author else "",
        f"license: {preset.license}" if preset.license else "no license given",
        f"made for {preset.base.name}" if preset.base.name else "",
        f"trigger words: {', '.join(preset.trigger_words)}" if preset.trigger_words else "",
        words.counted(len(preset.examples), "example prompt", "example prompts") if preset.examples else "",
        "with a preview image" if preset.preview else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def _carries(preset: Preset) -> str:
    return " and ".join(part for part in ("recipe", "fit") if getattr(preset, part) is not None)


def _text_of(entry: PresetEntry) -> str:
    from trainer.config.presets.preset import dump_preset

    preset = entry.preset
    # Show only built-in files as they are: their comments explain more than generated ones, and come from us.
    if entry.origin == "built-in":
        return read_text(entry.path, "text").rstrip()
    text = dump_preset(preset.replaced(preview=None)).rstrip()
    return text + ("\n\n# [preview] contains an image." if preset.preview else "")


def _print_listed(title: str, lines: Sequence[str]) -> None:
    """Print lines from other people's files, which are untrusted, under a title."""
    if lines and title:
        echo(title)
    for line in lines[:_MOST_DIFFERENCES]:
        echo(f"  {printable(line, 300)}")
    if len(lines) > _MOST_DIFFERENCES:
        echo(f"  and {len(lines) - _MOST_DIFFERENCES} more")


def _gpu_bytes() -> int | None:
    """Return the bytes of memory on the GPU that jobs are planned for; None without a GPU or a working driver."""
    try:
        return machine_here().total_bytes
    except ImpastoError:
        return None


def outlook(recipe: RecipeConfig, family: Family, gpu: str | None, written: FitConfig | None = None) -> Sequence[str]:
    """Return sentences about the plan for `recipe` on `gpu` (a name or size; None: this PC's GPU).

    Keys that are set in `written` are not changed. If no plan is possible, the sentences say why, because a preset may
    be meant for another PC. Raises ImpastoError for an unknown GPU.
    """
    return _planned(recipe, family, gpu, written)


def _planned(recipe: RecipeConfig, family: Family, gpu: str | None, written: FitConfig | None) -> Sequence[str]:
    from trainer.cli.planning import planned_for, traces_of_user
    from trainer.memory.planner.request import device_state_of, request_without_job

    device_state_of(gpu)
    try:
        request = request_without_job(family, recipe, gpu, fit=written)
    except ImpastoError as error:  # some keys work only together with others that the job must set
        return (f"Could not plan with this preset alone: {error.sentence}",)
    if not request.device_state.on_cpu:
        try:
            request.device_state.require_budget()
        except ImpastoError as error:
            return (error.sentence, error.remedy)
    with traces_of_user() as traces:
        planned = planned_for(request, traces)
    device_state, batch = planned.device_state, request.workload.recipe.effective_batch
    if planned.pick is None:
        lighter = plan_text.what_would(planned.reduced_recipe, device_state, planned.excess_bytes, batch)
        return (plan_text.nothing_fits(planned, request.written), lighter)
    sentence = plan_text.sentence(planned.pick, batch)
    return (
        sentence if device_state.on_cpu else f"On {device_state.gpu.name}: {sentence}",
        *map(plan_text.remark, request.remarks),
    )


def preset_of(source: str, family: Family | None = None, *, with_fit: bool) -> CreatedPreset:
    """Return a preset made from `source` (a preset, job, run or LoRA); `with_fit` includes a job's or run's fit.

    If both families have a preset with this name, `family` selects one of them.

    Raises ImpastoError if `source` is unknown, ambiguous, or cannot be shared.
    """
    path = Path(source)
    if path.suffix.lower() == ".safetensors":
        from trainer.config.presets.creating import preset_of_lora

        return preset_of_lora(path)
    if path.suffix.lower() == ".toml":
        return _of_file(path, with_fit)
    run = _find_run(source)
    made = None if path.is_dir() else _of_preset(source, family, none_is_fine=run is not None)
    if run is not None and made is not None:
        raise JobError(
            "preset.ambiguous",
            f'"{source}" is the name of a preset and of a run.',
            f"Specify the folder of the run instead: {run.path}",
        )
    if made is not None:
        return made
    return _of_run(run or find_run(source), with_fit)


def _of_file(path: Path, with_fit: bool) -> CreatedPreset:
    from trainer.config.load import load_job
    from trainer.config.presets.creating import CreatedPreset, preset_of_job
    from trainer.config.presets.exchange import load_preset

    try:
        return CreatedPreset(load_preset(path))
    except JobError as error:
        if error.code != "preset.job":
            raise
    job = load_job(path)
    family = family_of(job.base.model, None if job.base.family == "auto" else job.base.family)
    if family is None:
        sentence = f"Could not make a preset from {path.name}: its base may be SD 1.5 or SDXL."
        raise JobError("preset.no_family", sentence, 'Set base.family = "sd15" or "sdxl" in it.')
    return preset_of_job(job, family, with_fit=with_fit)


def _of_preset(name: str, family: Family | None, *, none_is_fine: bool) -> CreatedPreset | None:
    from trainer.config.presets.creating import CreatedPreset
    from trainer.config.presets.library import find_preset

    try:
        return CreatedPreset(find_preset(name, family).preset)
    except JobError as error:
        if error.code == "preset.unknown" and none_is_fine:
            return None
        raise


def _find_run(name: str) -> RunDirectory | None:
    """Return the run with this name or path; None if there is none. Raises RunError if several have this name."""
    try:
        return find_run(name)
    except RunError as error:
        if error.code == "run.unknown":
            return None
        raise


def _of_run(run: RunDirectory, with_fit: bool) -> CreatedPreset:
    """Return a preset made from a run's frozen job, its images' trigger words, and its last preview."""
    from trainer.config.load import load_job
    from trainer.config.presets.creating import preset_of_job
    from trainer.config.presets.preview_image import make_preview
    from trainer.dataset.dataset import read_listing

    job = load_job(run.job)
    if job.base.family == "auto":
        sentence = f"Could not make a preset from {run.job}: it does not state the family of its base."
        raise RunError("run.damaged", sentence, "Train the job again.")
    trained = [image for image in read_listing(run.listing) if image.kind == "train"]
    preview = None
    if samples := sorted(run.samples.glob("step-*-0.png")):
        with suppress(ImpastoError):  # a damaged preview must not prevent sharing the preset
            preview = make_preview(samples[-1])
    return preset_of_job(
        _as_typed(job, run),
        job.base.family,
        base_sha256=_base_sha256(run, job.base.name),
        triggers=list(dict.fromkeys(image.trigger for image in trained if image.trigger)),
        image=preview,
        with_fit=with_fit,
    )


def _as_typed(job: Job, run: RunDirectory) -> Job:
    """Return a frozen job with the recipe as the user wrote it, which preserves a length in images or epochs.

    If the run was extended, its length is the frozen number of steps. If the user's recipe cannot be read, the job
    keeps the frozen recipe.
    """
    from trainer.config.recipe import LENGTH_KEYS, RecipeConfig

    typed, first = run.read_user_recipe(), run.attempts()[:1]
    ran = first[0].get("job") if first else None
    with suppress(ValueError):
        if typed is not None and isinstance(ran, Mapping):
            recipe = RecipeConfig.model_validate(typed)
            if ran.get("recipe.steps") != job.recipe.steps:
                kept = {key: value for key, value in typed.items() if key not in LENGTH_KEYS}
                recipe = RecipeConfig.model_validate(kept | {"steps": job.recipe.steps})
            return job.replaced(recipe=recipe)
    return job


def _base_sha256(run: RunDirectory, name: str) -> str | None:
    """Return the SHA-256 that the last attempt recorded for the base; None if it recorded none."""
    from trainer.config.presets.creating import hash_of_base

    attempts = run.attempts()
    files = attempts[-1].get("base") if attempts else None
    if not isinstance(files, Mapping):
        return None
    return hash_of_base({path: digest for path, digest in files.items() if isinstance(digest, str)}, name)
