"""Read a job from ai-toolkit's YAML or JSON, with its datasets and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import JobError
from trainer.importers.ai_toolkit.datasets import read_datasets, resolutions_of
from trainer.importers.ai_toolkit.options import OPEN_TABLES, PROGRAM, TABLES
from trainer.importers.ai_toolkit.recipe import in_steps, translate
from trainer.importers.translation import (
    MOST_PROMPTS,
    ImportedJob,
    Moves,
    Translation,
    base_here,
    plain,
    sampler_called,
)
from trainer.protocol.reading import parse_yaml, read_json, read_text, reason_of

_BASES = ("model.name_or_path", "model.vae_path", "model.lora_path", "network.pretrained_lora_path")
_WITH_OWN_TABLE = ("train.ema_config", *OPEN_TABLES)
_FLAGS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "w": ("width", int),
    "h": ("height", int),
    "d": ("seed", int),
    "seed": ("seed", int),
    "s": ("steps", int),
    "steps": ("steps", int),
    "l": ("guidance", float),
    "cfg": ("guidance", float),
    "n": ("negative", str),
}
_SAMPLE_NAMES = {"neg": "negative", "guidance_scale": "guidance", "sample_steps": "steps"}
_NUMBERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("width", "height", "seed", "steps"), int),
    "guidance": float,
}


def is_job(data: Any) -> bool:
    """Return whether the value of a .yaml or .json file is a job of ai-toolkit."""
    return isinstance(data, dict) and isinstance(data.get("config"), dict) and "process" in data["config"]


def read_tree(path: Path) -> Any:
    """Return the value of a .json or .yaml file; texts in YAML are not yet numbers or switches.

    Raises UnusableFileError, also for aliases and deep nesting, and OSError.
    """
    if path.suffix.lower() == ".json":
        return read_json(path, "config")
    return parse_yaml(read_text(path, "config"), path)


def read_job_file(path: Path, moved: Moves = ()) -> ImportedJob:
    """Read a job; `moved` says where folders of another PC are on this one.

    Raises ImpastoError and OSError for it and the files that it names.
    """
    data = read_tree(path)
    processes = data["config"]["process"] if is_job(data) else None
    if not isinstance(processes, list) or not processes or not isinstance(processes[0], dict):
        sentence = f"Could not import {path}: it has no config.process, as a job of {PROGRAM} has."
        raise JobError("import.unknown", sentence, f"Give a job of {PROGRAM}, such as those in its folder config.")
    process = processes[0]
    stated = _flattened(data, process)
    for name in _BASES:
        stated |= {name: base_here(stated[name], path.parent, moved)} if plain(stated.get(name)) else {}
    found = translate(stated)
    imported = ImportedJob(found)
    if len(processes) > 1:
        imported.notes.append(f"Only the first of {len(processes)} processes was imported.")
    _read_folders(process, found, path, imported, moved)
    _read_previews(process, found)
    found.finish()
    return imported


def _flattened(data: Mapping[str, Any], process: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those in tables as "table.name"; lists of texts are joined with commas."""
    stated = {name: _leaf(value) for name, value in data.items() if name != "config"}
    stated.update({f"config.{name}": _leaf(value) for name, value in data["config"].items() if name != "process"})
    for name, value in process.items():
        stated.update(_within(name, value) if name in TABLES and isinstance(value, dict) else {name: _leaf(value)})
    return stated


def _within(table: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{table}.{name}"
        if path in _WITH_OWN_TABLE and isinstance(value, dict):
            yield from ((f"{path}.{key}", _leaf(each)) for key, each in value.items())
        elif path not in _WITH_OWN_TABLE or plain(value) is not None:
            yield path, _leaf(value)


def _leaf(value: Any) -> Any:
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        return ",".join(str(each) for each in value)
    return f"({len(value)} entries)" if isinstance(value, dict | list) else value


def _read_folders(
    process: Mapping[str, Any], found: Translation, path: Path, imported: ImportedJob, moved: Moves
) -> None:
    datasets = process.get("datasets")
    if not datasets:
        found.carry("datasets trigger_word", {})
        return
    if not isinstance(datasets, list) or not all(isinstance(each, dict) for each in datasets):
        raise JobError("import.value", "datasets must be a list of folders.", f"Correct it in {PROGRAM}'s file.")
    dataset = read_datasets(datasets, found["trigger_word"], path, moved)
    imported.add_dataset(dataset, ())
    ours = dataset.values()
    common = resolutions_of(datasets[0].get("resolution"))
    imported.folders = tuple(
        folder.replaced(resolutions=None) if folder.resolutions == common[:1] else folder for folder in imported.folders
    )
    ours |= {"recipe.resolution": common[0], "recipe.images.max_upscale": 1.0}  # images are never enlarged there
    found.carry("datasets", ours)
    found.carry("trigger_word", {})  # which is now that of each folder


def _read_previews(process: Mapping[str, Any], found: Translation) -> None:
    """Read the prompts of previews, and how often they are made."""
    every = found["sample.sample_every"]
    found.carry("sample.sample_every", {"report.previews.every": in_steps(found, every)} if every > 0 else {})
    is_first = found["train.force_first_sample"] or not found["train.skip_first_sample"]
    found.carry(
        "train.skip_first_sample train.force_first_sample", {} if is_first else {"report.previews.first": False}
    )
    table = process.get("sample")
    samples = table.get("samples") or table.get("prompts") or [] if isinstance(table, dict) else []
    try:
        prompts = [_preview(found, sample, place) for place, sample in enumerate(samples[:MOST_PROMPTS])]
    except (ValueError, TypeError, AttributeError, OverflowError) as fault:
        sentence = f"Could not read the samples: {reason_of(fault)}."
        raise JobError("import.value", sentence, f"Correct them in {PROGRAM}'s file.") from fault
    names = "sample.prompts sample.samples train.disable_sampling"
    if found["train.disable_sampling"]:
        found.change(names, {}, "sampling is off, so there are no prompts")
    elif len(samples) > MOST_PROMPTS:
        found.change(names, {"report.previews.prompts": prompts}, f"only the first {MOST_PROMPTS} prompts are used")
    else:
        found.carry(names, {"report.previews.prompts": prompts} if prompts else {})
    # These are now those of each prompt.
    common = "width height seed walk_seed neg guidance_scale sample_steps sampler"
    found.carry(" ".join(f"sample.{name}" for name in common.split()), {})


def _preview(found: Translation, sample: Any, place: int) -> dict[str, Any]:
    """Return a prompt with flags such as "--w 512", or a table with a prompt, as a preview."""
    own: Mapping[str, Any] = sample if isinstance(sample, dict) else {"prompt": sample}
    text, *flags = str(own.get("prompt") or "").split("--")
    prompt: dict[str, Any] = {
        "prompt": text.strip().replace("[trigger]", found["trigger_word"] or ""),
        "negative": "" if plain(found["sample.neg"]) in (None, False) else found["sample.neg"],
        "width": found["sample.width"],
        "height": found["sample.height"],
        "seed": found["sample.seed"] + (place if found["sample.walk_seed"] else 0),
        "steps": found["sample.sample_steps"],
        "guidance": found["sample.guidance_scale"],
        "sampler": sampler_called(found["sample.sampler"]) or "euler",
    }
    for name, value in own.items():
        key = _SAMPLE_NAMES.get(name, name)
        if key in prompt and key != "prompt" and plain(value) not in (None, False):
            prompt[key] = _NUMBERS.get(key, str)(plain(value) if key in _NUMBERS else value)
    for flag in flags:
        name, _, value = flag.strip().partition(" ")
        key, convert = _FLAGS.get(name, ("", str))
        if key:
            prompt[key] = convert(value.strip())
    return {
        **prompt,
        "width": prompt["width"] // 8 * 8,
        "height": prompt["height"] // 8 * 8,
        "seed": abs(prompt["seed"]),
    }
