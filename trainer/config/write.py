"""Write job files: exact dumps, with or without comments, and new job files for `trainer new`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from trainer.config.base import NATIVE_RESOLUTION, Family
from trainer.config.fit import PLANNED, FitConfig
from trainer.config.job import SCHEMA, Job
from trainer.config.paths import is_base_path
from trainer.config.problems import validated
from trainer.config.recipe import LENGTH_KEYS, RecipeConfig
from trainer.config.resolve import Machine, default_images_seen
from trainer.config.schema import Section, choices, fields, sections_in, values_text
from trainer.config.toml_file import toml_value
from trainer.files.assets import asset_path

WIDTH = 110
# Their keys are those of the recipe, which are explained there.
_FOLDER_TABLES = ("dataset.folders.*.captions", "dataset.folders.*.images")
_PLANNERS = ("fallbacks.", "fit.int8_products")  # written by the planner and measurements, not by users


def dump_job(job: Job, *, comments: bool) -> str:
    """Return the job as TOML that loads as an equal Job; None values are left out.

    With ``comments``, each key is explained, and keys without a value appear as comments.
    """
    return "\n".join(_section_lines(job, "", comments)).strip() + "\n"


def _section_lines(section: Section, path: str, comments: bool) -> Iterator[str]:
    """Yield the lines of a table: its own keys first, then its subtables, as TOML requires."""
    tables: list[tuple[str, FieldInfo, Any]] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = field.alias or name
        if isinstance(value, Section) or (value and sections_in(field.annotation)):
            tables.append((f"{path}.{key}" if path else key, field, value))
        else:
            yield from _key_lines(key, field, value, comments)
    for key, field, value in tables:
        many = isinstance(value, tuple)
        for item in value if many else (value,):
            yield ""
            yield from _comment(field.description or "") if comments else ()
            yield f"[[{key}]]" if many else f"[{key}]"
            yield from _section_lines(item, key, comments)


def _key_lines(key: str, field: FieldInfo, value: Any, comments: bool) -> Iterator[str]:
    if comments:
        yield from _comment(_explained(field))
    if value is not None:
        yield f"{key} = {toml_value(value)}"
    elif comments:
        yield f"# {key} = <{values_text(field.annotation, field)}>"


def _explained(field: FieldInfo) -> str:
    return _with_choices(field.description or "", choices(field.annotation))


def _with_choices(doc: str, words: Sequence[str]) -> str:
    """Return a help text with the allowed values appended."""
    return f"{doc} One of {', '.join(words)}." if len(words) > 1 else doc


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")


def new_job_text(
    *,
    name: str,
    base: str,
    images: Path,
    folder: Path,
    family: Family | None,
    machine: Machine,
    trigger: str | None = None,
    class_words: str | None = None,
    regularization: str | None = None,
    count: int | None = None,
    recipe: RecipeConfig | None = None,
    expected: FitConfig | None = None,
) -> str:
    """Return the job.toml that ``trainer new`` writes to ``folder``: important settings first, with explanations.

    ``base`` and ``images`` are relative to the current folder, ``count`` is the number of images (None: unknown),
    ``regularization`` is a folder of images of the class beside the job (None: there is none),
    ``family`` is None if the base is not on disk yet, ``recipe`` is a preset's (None: the default), and ``expected`` is
    the typical fit for a GPU like the one in ``machine`` (None: unknown). The text loads as a Job; paths near
    ``folder`` are relative to it.
    """
    stated = _first_recipe(family, count) if recipe is None else _preset_recipe(recipe, count)
    job = validated(
        Job,
        {
            "schema": SCHEMA,
            "name": name,
            "base": {"model": near_path(Path(base), folder) if is_base_path(base, Path.cwd()) else base},
            "dataset": {"folders": _new_folders(near_path(images, folder), trigger, class_words, regularization)},
            "recipe": stated,
            "report": {"previews": {"prompts": [{"prompt": prompt} for prompt in default_prompts(trigger)]}},
        },
        "job.invalid",
        "The new job",
        "Fix this and run the command again.",
    )
    lines = [
        *_comment("An Impasto training job. Start it with: python -m trainer train job.toml"),
        *_comment("Paths are relative to this file. Write Windows paths in 'single quotes'."),
        *set_key_lines(job, ""),
        "",
        *_fit_lines(machine, expected),
        "",
        *_comment("All other settings with their defaults. Add a key to its table above, or use --set."),
        *_rest_lines(job),
    ]
    return "\n".join(lines) + "\n"


def _new_folders(
    images: str, trigger: str | None, class_words: str | None, regularization: str | None
) -> list[dict[str, str]]:
    """Return the folders of a new job: the user's images, and those of their class if there are any."""
    words = {"class_words": class_words} if class_words else {}
    folders = [{"path": images, **({"trigger": trigger} if trigger else {}), **words}]
    if regularization is not None:
        folders.append({"path": f"./{regularization}", "kind": "regularization", **words})
    return folders


def _first_recipe(family: Family | None, count: int | None) -> dict[str, Any]:
    """Return common recipe settings for a new job, with a default length for ``count`` images.

    For SD 1.5 the text encoder is trained at half the learning rate, for SDXL not at all.
    """
    recipe: dict[str, Any] = {
        "rank": 16,
        "alpha": 16.0,
        "learning_rate": 1e-4,
        "effective_batch": 4,
        "images_seen": default_images_seen(count or 1),
    }
    if family is not None:
        recipe["resolution"] = NATIVE_RESOLUTION[family]
    recipe["text_encoder"] = {"learning_rate": 5e-5 if family == "sd15" else 0.0}
    return recipe


def _preset_recipe(recipe: RecipeConfig, count: int | None) -> dict[str, Any]:
    """Return the keys set in a preset's recipe, plus a default length for ``count`` images if it sets none."""
    stated = recipe.model_dump(by_alias=True, exclude_unset=True)
    if not any(stated.get(key) for key in LENGTH_KEYS):
        stated["images_seen"] = default_images_seen(count or 1)
    return stated


def default_prompts(trigger: str | None) -> list[str]:
    """Return preview prompts with the trigger word (training should change them) and without it (it should not)."""
    plain = "a house by a lake"
    return [trigger, f"{trigger}, {plain}", plain] if trigger else ["a portrait of a woman", plain]


def near_path(path: Path, folder: Path) -> str:
    """Return ``path`` with forward slashes: relative to ``folder`` if inside the folder's parent, else absolute."""
    absolute, home = path.expanduser().absolute(), folder.absolute()
    if not absolute.is_relative_to(home.parent):
        return absolute.as_posix()
    relative = Path(os.path.relpath(absolute, home)).as_posix()
    return relative if relative.startswith("..") else f"./{relative}"


def set_key_lines(section: Section, path: str) -> Iterator[str]:
    """Yield lines for the keys set in ``section``, each with an explanation; ``path`` is the table's dotted key."""
    tables: list[tuple[str, Section, str]] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{path}.{field.alias or name}" if path else field.alias or name
        if name not in section.model_fields_set or value is None:
            continue
        if isinstance(value, Section):
            tables.append((key, value, f"[{key}]"))
        elif sections_in(field.annotation):
            tables.extend((key, item, f"[[{key}]]") for item in value)
        else:
            yield from _key_lines(field.alias or name, field, value, comments=True)
    for key, inner, header in tables:
        body = list(set_key_lines(inner, key))
        # A table that contains only tables needs no header.
        yield from ("", header) if body and body[0] else ()
        yield from body


def _fit_lines(machine: Machine, expected: FitConfig | None) -> Iterator[str]:
    """Yield comments that explain the fit and show a typical one; setting its keys would limit the planner."""
    yield from _comment(
        "How the job fits this machine ([fit]) is planned when it starts, from the memory that is free then; "
        "`python -m trainer plan job.toml` shows the plan. Keys you set under [fit] are never changed."
    )
    if expected is None:
        return
    yield from _comment(f"Typical plan for {_machine_name(machine)}:")
    yield "#   [fit]"
    for key in PLANNED:
        if (value := getattr(expected, key)) is not None:
            yield f"#   {key} = {toml_value(value)}  # {_explained(FitConfig.model_fields[key])}"


def _machine_name(machine: Machine) -> str:
    if machine.device == "cpu" or machine.total_bytes is None:
        return f"the CPU ({machine.cores} cores)"
    return f"{machine.gpu or 'a GPU'} with {machine.total_bytes / 1024**3:.0f} GB"


def _rest_lines(job: Job) -> Iterator[str]:
    """Yield a comment for each key that is not set: its dotted name, default and help text."""
    held = set(_held(job.model_dump(by_alias=True, exclude_unset=True), ""))
    for found in fields(Job):
        if found.key in _FOLDER_TABLES:
            yield f"#   [{found.key.replace('.*', '')}]  # {found.doc}"
        if found.key.startswith(_FOLDER_TABLES):
            continue
        key = found.key.replace(".*", ".0")
        optimizer = f"recipe.optimizer[{job.recipe.optimizer.name}]."
        key = key.replace(optimizer, "recipe.optimizer.")  # only the arguments of the job's own optimizer
        if "[" in key or found.values in ("a table", "a list of tables") or key in held or key.startswith(_PLANNERS):
            continue
        value = toml_value(found.default) if found.default is not None else f"<{found.values}>"
        words = (
            choices(found.annotation) if found.default is not None else ()
        )  # without a default, the value already lists them
        yield f"#   {key} = {value}  # {_with_choices(found.doc, words)}"


def _held(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, tuple):
        value = {str(number): item for number, item in enumerate(value)}
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _held(inner, f"{key}.{name}" if key else name)
    else:
        yield key


def demo_job(images: Path | None = None) -> str:
    """Return the demo job's text with the bundled base; ``images`` is its image folder (None: the bundled images)."""
    template = asset_path("demo", "job.toml").read_text(encoding="utf-8")
    base, place = (
        toml_value(str(asset_path("demo", "base"))),
        toml_value(str(images or asset_path("demo", "pictures"))),
    )
    return template.replace("@BASE@", base).replace("@PICTURES@", place)
