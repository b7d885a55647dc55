"""Finds out what `presets share` is asked to share: a preset, a job, a run or a LoRA file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.jobs import family_of
from trainer.errors import ImpastoError, JobError, RunError
from trainer.protocol.run_directory import RunDirectory, find_run

if TYPE_CHECKING:
    from trainer.config.base import Family
    from trainer.config.job import Job
    from trainer.config.presets.making import Made


def preset_of(source: str, family: Family | None = None, *, with_fit: bool) -> Made:
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


def _of_file(path: Path, with_fit: bool) -> Made:
    from trainer.config.load import load_job
    from trainer.config.presets.exchange import load_preset
    from trainer.config.presets.making import Made, preset_of_job

    try:
        return Made(load_preset(path))
    except JobError as error:
        if error.code != "preset.job":
            raise
    job = load_job(path)
    family = family_of(job.base.model, None if job.base.family == "auto" else job.base.family)
    if family is None:
        sentence = f"{path.name} does not tell whether its base is SD 1.5 or SDXL."
        raise JobError("preset.no_family", sentence, 'State base.family = "sd15" or "sdxl" in it.')
    return preset_of_job(job, family, with_fit=with_fit)


def _of_preset(name: str, family: Family | None, *, none_is_fine: bool) -> Made | None:
    from trainer.config.presets.library import find_preset
    from trainer.config.presets.making import Made

    try:
        return Made(find_preset(name, family).preset)
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


def _of_run(run: RunDirectory, with_fit: bool) -> Made:
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
