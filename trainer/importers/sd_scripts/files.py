"""Read jobs from the TOML files and command lines of sd-scripts, with the images and prompts that they name."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config.base import Family
from trainer.errors import BaseModelError, DatasetError, JobError
from trainer.files.identify import identify_base
from trainer.importers.datasets import ImportedDataset
from trainer.importers.sd_scripts.dataset import import_dataset, read_kohya_metadata
from trainer.importers.sd_scripts.options import PATHS
from trainer.importers.sd_scripts.recipe import translate
from trainer.importers.translation import (
    MOST_PROMPTS,
    ImportedJob,
    Moves,
    Translation,
    base_here,
    relocated,
    sampler_called,
)
from trainer.protocol.reading import read_text, read_toml, reason_of
from trainer.protocol.text import printable

_SCRIPTS: Mapping[str, Family] = {"train_network": "sd15", "sdxl_train_network": "sdxl"}
_SCRIPT = re.compile(r"(?:.*[/\\])?(\w+_train_network|train_network)(?:\.py)?")
_CONTINUED = re.compile(r"[\\^`][ \t]*\r?\n")
_OF_WINDOWS = re.compile(r"[\^`][ \t]*\r?\n|\\\w")
"""What only commands for cmd and PowerShell have: their continued lines, and paths with backslashes."""
_ASSIGNED = re.compile(r"""\s*(?:export\s+|set\s+"?|\$env:|\$)?([A-Za-z_]\w{0,60})\s*=\s*(.{1,300})""", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:env:)?\{?(\w{1,61})\}?|%(\w{1,61})%")
_LONGEST_LINE = 100_000
_ENDS = {"&&", "||", "|", ";", "&", ">", ">>", "2>&1"}
"""Words of a shell after which the arguments are over."""
_NUMBERED = re.compile(r"(\d+)_(.*)")
_PROMPT_FLAGS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "w": ("width", int),
    "h": ("height", int),
    "d": ("seed", int),
    "s": ("steps", int),
    "l": ("guidance", float),
    "g": ("guidance", float),
    "n": ("negative", str),
    "ss": ("sampler", str),
}
_WINDOWS_PART = re.compile(r"""(\s+)|"([^"]*)"|'([^']*)'|([^\s"']+|["'])""")


def read_toml_job(path: Path, family: Family | None = None, moved: Moves = ()) -> ImportedJob:
    """Read a job from a file for `--config_file`. Raises ImpastoError and OSError for it and the files that it names.

    `family` is that of the base, if it is known, and `moved` says where folders of another PC are on this one.
    """
    return read_options(_without_sections(path), path.parent, family, moved)


def read_command(text: str, folder: Path, family: Family | None = None, moved: Moves = ()) -> ImportedJob:
    """Read a job from a command line that starts a script of sd-scripts; its paths are relative to `folder`.

    Raises JobError if it is not one, and ImpastoError and OSError for the files that it names.
    """
    script, arguments = _command(text)
    stated = options_in(arguments)
    if stated.get("config_file"):
        name = relocated(str(stated["config_file"]), moved)
        path = folder / (name if name.endswith(".toml") else f"{name}.toml")
        stated = {**_without_sections(path), **stated}
    return read_options(stated, folder, family or _SCRIPTS[script], moved)


def _command(text: str) -> tuple[str, list[str]]:
    """Return the name of the script that a command starts, and its arguments, which may continue on further lines."""
    is_windows = bool(_OF_WINDOWS.search(text))
    lines = _CONTINUED.sub(" ", text).splitlines()
    other = ""
    variables: dict[str, str] = {}
    for number, line in enumerate(lines):
        if assigned := _ASSIGNED.fullmatch(line):
            variables[assigned[1]] = _unquoted(assigned[2])
        if "train_network" not in line or line.lstrip().lower().startswith(("#", "rem ", "::")):
            continue
        words = _words(_filled(line, variables), is_windows)
        for place, word in enumerate(words):
            if (script := _SCRIPT.fullmatch(word)) and script[1] in _SCRIPTS:
                arguments = words[place + 1 :]
                for further in itertools.takewhile(lambda line: line.lstrip().startswith("--"), lines[number + 1 :]):
                    arguments += _words(_filled(further, variables), is_windows)
                return script[1], list(itertools.takewhile(lambda word: word not in _ENDS, arguments))
            other = other or (script[1] if script else "")
    what = f"starts {printable(other, 60)}.py, which trains another kind of model" if other else "starts no script"
    remedy = "Paste a command with train_network.py or sdxl_train_network.py."
    raise JobError("import.command", f"Could not read this command: it {what}.", remedy)


def _unquoted(value: str) -> str:
    """Return the value of a variable without its quotation marks, or the comment after it."""
    value = value.strip()
    if value[0] in "\"'" and (end := value.find(value[0], 1)) > 0:
        return value[1:end]
    return value.partition(" #")[0].strip().rstrip('"')


def _filled(line: str, variables: Mapping[str, str]) -> str:
    """Return a line with the variables that the script sets before it; others stay as they are."""
    if len(line) > _LONGEST_LINE:
        return line
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[0]), line)


def _without_sections(path: Path) -> dict[str, Any]:
    """Return the options in a TOML file, whose sections have no meaning."""
    stated: dict[str, Any] = {}
    for name, value in read_toml(path, "config").items():
        stated.update(value if isinstance(value, dict) else {name: value})
    return stated


def options_in(arguments: Iterable[str]) -> dict[str, Any]:
    """Return the options in the arguments of a script; those with several values as lists."""
    found: dict[str, Any] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else True
        elif name:
            known = found[name]
            found[name] = word if known is True else [*(known if isinstance(known, list) else [known]), word]
    return found


def _words(line: str, is_windows: bool) -> list[str]:
    """Split a line into words as its shell does; backslashes are part of Windows paths."""
    if is_windows:
        words = [""]
        for space, double, single, bare in _WINDOWS_PART.findall(line):
            words += [""] if space else []
            words[-1] += double or single or bare
        return [word for word in words if word]
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        raise JobError(
            "import.command", "Could not read this command: a quotation mark is not closed.", "Paste all of it."
        ) from None


def read_options(
    stated: Mapping[str, Any],
    folder: Path,
    family: Family | None,
    moved: Moves,
    prompts: str | None = None,
    dataset: ImportedDataset | None = None,
) -> ImportedJob:
    """Read a job from options, whose paths are relative to `folder`.

    A GUI may have the `prompts` of previews, as the lines of a prompt file, and the `dataset` in its own file.
    """
    here = {name: base_here(value, folder, moved) if name in PATHS else value for name, value in stated.items()}
    found = translate(here, family or _family_of(here.get("pretrained_model_name_or_path"), folder))
    imported = ImportedJob(found)
    _read_dataset(found, folder, imported, moved, dataset)
    _read_prompts(found, folder, prompts)
    found.carry("config_file", {})
    found.finish()
    imported.settle()
    return imported


def _family_of(base: Any, folder: Path) -> Family | None:
    """Return the family of a base that is on this PC."""
    if not isinstance(base, str) or not base or not (folder / base).exists():
        return None
    with suppress(BaseModelError):
        return identify_base(folder / base).family
    return None


def _read_dataset(
    found: Translation, folder: Path, imported: ImportedJob, moved: Moves, dataset: ImportedDataset | None
) -> None:
    names = "train_data_dir reg_data_dir in_json dataset_repeats conditioning_data_dir"
    if found["dataset_config"]:
        dataset = import_dataset(folder / found["dataset_config"])
    if dataset:
        found.carry("dataset_config", dataset.values())
        found.lack(names, "dataset_config takes precedence in sd-scripts")
        imported.add_dataset(dataset, moved)
        return
    found.carry("dataset_config", {})
    folders = [
        *_folders(found["train_data_dir"], folder, "train"),
        *_folders(found["reg_data_dir"], folder, "regularization"),
    ]
    if found["in_json"] and found["train_data_dir"]:
        images = folder / found["train_data_dir"]
        folders = [{"path": str(images), "repeats": found["dataset_repeats"]}]
        imported.captions.update(_captions(folder / found["in_json"], images, found["caption_separator"]))
    if found["conditioning_data_dir"]:
        for each in folders:
            each["mask_folder"] = str(folder / found["conditioning_data_dir"])
    found.carry(names, {"dataset.folders": folders} if folders else {})


def _captions(path: Path, images: Path, separator: str) -> dict[Path, tuple[str, ...]]:
    """Return the captions in a metadata file, which are joined with their tags; raises DatasetError if it has none."""
    try:
        captions, _ = read_kohya_metadata(path, images, separator)
    except (ValueError, TypeError, LookupError, AttributeError) as fault:
        sentence = f"Could not read the captions in {path}: {reason_of(fault)}."
        raise DatasetError("import.captions", sentence, "Correct the file, or remove in_json.") from fault
    return captions


def _folders(root: str | None, folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the folders "10_cat" in a folder of them; the folder itself if it is not on this PC."""
    if root is None:
        return
    path = folder / root
    if not path.is_dir():
        yield {"path": root, "kind": kind, "recursive": True}
        return
    for inside in sorted(path.iterdir()):
        if inside.is_dir() and (parts := _NUMBERED.fullmatch(inside.name)):
            yield {"path": str(inside), "kind": kind, "repeats": int(parts[1]), "class_words": parts[2] or None}


def _read_prompts(found: Translation, folder: Path, prompts: str | None) -> None:
    sampler = sampler_called(found["sample_sampler"]) or "euler"
    name = found["sample_prompts"]
    if name and not (folder / name).is_file():
        found.change("sample_prompts sample_sampler", {}, "the file is not there, so there are no previews")
        return
    if name and not name.lower().endswith(".txt"):
        found.lack("sample_prompts sample_sampler", "only prompts in a .txt file are read")
        return
    lines = (read_text(folder / name, "text") if name else prompts or "").splitlines()
    texts = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    previews = [prompt_of(text, sampler) for text in texts[:MOST_PROMPTS]]
    values = {"report.previews.prompts": previews} if previews else {}
    if len(texts) > MOST_PROMPTS:
        found.change("sample_prompts sample_sampler", values, f"only the first {MOST_PROMPTS} prompts are used")
    else:
        found.carry("sample_prompts sample_sampler", values)


def prompt_of(line: str, sampler: str) -> dict[str, Any]:
    """Return a line of a prompt file as a preview, such as "a cat --w 512 --n blurry"; unknown flags are dropped."""
    text, *flags = line.split(" --")
    prompt: dict[str, Any] = {"prompt": text.strip(), "sampler": sampler}
    for flag in flags:
        name, _, value = flag.partition(" ")
        key, convert = _PROMPT_FLAGS.get(name.lower(), ("", str))
        try:
            made = convert(value.strip())
        except ValueError:  # sd-scripts also goes on without it
            continue
        if key in ("width", "height"):
            made -= made % 8
        if key == "sampler":
            made = sampler_called(made) or sampler
        if key:
            prompt[key] = made
    return prompt
