"""Recognize other tools by their folders and find where they keep bases and LoRAs.

A tool's own settings can name other folders. Settings files are read as text and never run; an unreadable one is
treated as missing. The folder layouts are those of ComfyUI 0.3, A1111 1.10, Forge, SD.Next, Fooocus, InvokeAI 3 to 6,
SwarmUI, Stability Matrix 2, kohya_ss 25 and OneTrainer, according to their source code in 2026.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core.models.verdict import Tool
from trainer.protocol import files
from trainer.protocol.reading import UnusableFileError, open_file, parse_yaml, read_json, read_toml

_FDS_ENTRY = re.compile(r"\t(?P<key>\w+):[ \t]*(?P<value>[^#\n]*)")
_ASSIGNMENT = re.compile(r"\s*(?:@?set\s+|export\s+)?\"?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.IGNORECASE)
_REFERENCE = re.compile(r"%(\w+)%|\$\{(\w+)\}|\$(\w+)")
_OPTION = re.compile(
    r"--(?P<name>ckpt-dirs?|lora-dirs?|models-dir|data-dir|forge-ref-a1111-home)(?:\s+|=)"
    r"(?:\"(?P<double>[^\"]+)\"|'(?P<single>[^']+)'|(?P<bare>[^\s\"']+))"
)
_LARGEST = 1 << 20
_COMFY_YAML = ("extra_model_paths.yaml", "extra_models_config.yaml")
_LAUNCHERS = ("webui-user.bat", "webui-user.sh")
_MOST_PRESETS = 200
_DRIVE_FIXED = 3  # Windows' GetDriveTypeW
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "fuse.sshfs", "fuse.rclone", "davfs", "autofs"}


def options_of(script: str) -> Iterator[tuple[str, str]]:
    """Yield a launcher's folder options as (name without dashes, value), with variables expanded."""
    known: dict[str, str] = {}
    joined = re.sub(r"[ \t]*[\^\\][ \t]*\r?\n", " ", script)  # joins continued lines
    for line in joined.splitlines():
        if assigned := _ASSIGNMENT.fullmatch(line):  # comment lines do not match
            known[assigned["name"].upper()] = _REFERENCE.sub(lambda found: _known(known, found), assigned["value"])
    text = known.get("COMMANDLINE_ARGS", "").strip().replace('\\"', "'")
    if text[:1] == text[-1:] and text[:1] in ('"', "'"):
        text = text[1:-1]  # the quotes of the whole assignment
    for option in _OPTION.finditer(text):
        yield option["name"], option["double"] or option["single"] or option["bare"]


def _known(known: dict[str, str], reference: re.Match[str]) -> str:
    name = next(group for group in reference.groups() if group)
    return known.get(name.upper(), reference[0]).strip("\"' ")


@dataclass(frozen=True, slots=True)
class Installation:
    """A tool installed on this PC."""

    tool: Tool
    folder: Path
    bases: tuple[Path, ...] = ()
    """Existing folders to search for bases, and individual bases that the tool's settings name."""
    loras: tuple[Path, ...] = ()
    """Existing folders that the tool loads LoRAs from; new LoRAs are copied to the first one."""
    within: tuple[Path, ...] = ()
    """Folders where the tool installs other tools."""


def recognize(folder: Path) -> Installation | None:
    """Return the tool installed in a folder, or None; raises OSError if the folder cannot be listed."""
    with os.scandir(files.long_path(folder)) as entries:
        names = frozenset(entry.name for entry in entries)
    for read in (_stability_matrix, _swarm, _invoke, _comfy, _webui, _one_trainer, _kohya):
        found = read(folder, names)
        if found:
            return found
    return None


def library_of_stability_matrix(settings: Path) -> Path | None:
    """Return the library folder named in Stability Matrix's library.json, or None."""
    try:
        named = read_json(settings / "library.json", "settings").get("LibraryPath")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(named) if isinstance(named, str) and named else None


def _stability_matrix(folder: Path, names: frozenset[str]) -> Installation | None:
    """Recognize a Stability Matrix library, whose model folders are shared by all its packages."""
    models = folder / "Models"
    if not {"Models", "Packages"} <= names or not (models / "StableDiffusion").is_dir():
        return None
    bases, loras = [models / "StableDiffusion", models / "Diffusers"], [models / "Lora", models / "LyCORIS"]
    return _made("Stability Matrix", folder, bases, loras, [folder / "Packages"])


def _swarm(folder: Path, names: frozenset[str]) -> Installation | None:
    if "Data" not in names or not (folder / "Data" / "Settings.fds").is_file():
        return None
    paths = _fds_section(_text(folder / "Data" / "Settings.fds"), "Paths")
    roots = [_within(folder, root) for root in _list(paths, "ModelRoot", "Models")]
    bases = [_within(root, name) for root in roots for name in _list(paths, "SDModelFolder", "Stable-Diffusion")]
    loras = [_within(root, name) for root in roots for name in _list(paths, "SDLoraFolder", "Lora")]
    return _made("SwarmUI", folder, bases, loras, [folder / "dlbackend", folder / "dlbackend" / "comfy"])


def _invoke(folder: Path, names: frozenset[str]) -> Installation | None:
    """Recognize InvokeAI: versions 3 to 5 sort models by family and kind; version 6 uses one folder.

    Only version 3 imports new LoRAs automatically.
    """
    if "invokeai.yaml" not in names:
        return None
    settings = _yaml_table(folder / "invokeai.yaml")
    older = _as_table(_as_table(settings.get("InvokeAI")).get("Paths"))
    named = settings.get("models_dir") or older.get("models_dir")
    models = _within(folder, named if isinstance(named, str) else "models")
    sorted_ones = [path for path in (models / "sd-1" / "main", models / "sdxl" / "main") if path.is_dir()]
    return _made("InvokeAI", folder, sorted_ones or [models], [folder / "autoimport" / "lora"])


def _comfy(folder: Path, names: frozenset[str]) -> Installation | None:
    """Recognize ComfyUI (checkout, portable, or desktop data folder) and Fooocus, which shares its layout."""
    configs = [name for name in _COMFY_YAML if name in names]
    models = folder / "models"
    if not configs and not (models / "checkpoints").is_dir():
        return None
    extra = [_comfy_paths(folder / name) for name in configs]
    bases = [path for one in extra for kind in ("checkpoints", "diffusers") for path in one.get(kind, ())]
    loras = [path for one in extra for path in one.get("loras", ())]
    tool: Tool = "Fooocus" if "fooocus_version.py" in names else "ComfyUI"
    return _made(tool, folder, [models / "checkpoints", models / "diffusers", *bases], [models / "loras", *loras], [])


def _comfy_paths(config: Path) -> dict[str, list[Path]]:
    """Return the extra folders in a ComfyUI configuration file, by kind of model.

    Relative paths start at the section's base_path or, if it has none, at the folder of the file.
    """
    found: dict[str, list[Path]] = {}
    for section in map(_as_table, _yaml_table(config).values()):
        base = section.get("base_path")
        root = _within(config.parent, base) if isinstance(base, str) and base else config.parent
        for kind, value in section.items():
            if kind != "base_path" and isinstance(value, str):
                found.setdefault(kind, []).extend(_within(root, line) for line in value.split("\n") if line)
    return found


def _webui(folder: Path, names: frozenset[str]) -> Installation | None:
    """Recognize A1111, Forge and SD.Next, including folders set by launcher options."""
    if not (folder / "models" / "Stable-diffusion").is_dir() and not (set(_LAUNCHERS) & names and "modules" in names):
        return None
    options = [option for name in _LAUNCHERS if name in names for option in options_of(_text(folder / name))]
    models = [folder / "models"]
    models += [_within(folder, value) for option, value in options if option == "models-dir"]
    homes = [_within(folder, value) for option, value in options if option in ("data-dir", "forge-ref-a1111-home")]
    models += [home / "models" for home in homes]
    bases = [_within(folder, value) for option, value in options if option in ("ckpt-dir", "ckpt-dirs")]
    loras = [_within(folder, value) for option, value in options if option in ("lora-dir", "lora-dirs")]
    bases += [place / "Stable-diffusion" for place in models] + [place / "Diffusers" for place in models]
    return _made("A1111/Forge", folder, bases, [*loras, *(place / "Lora" for place in models)])


def _one_trainer(folder: Path, names: frozenset[str]) -> Installation | None:
    """Recognize OneTrainer, which stores no bases itself: its presets name the bases in use."""
    if not {"training_presets", "modules"} <= names:
        return None
    presets = sorted((folder / "training_presets").glob("*.json"))[:_MOST_PRESETS]
    named = [path for preset in presets if (path := _base_of_preset(preset))]
    return _made("OneTrainer", folder, [folder / "models", *named], [])


def _base_of_preset(preset: Path) -> Path | None:
    try:
        named = read_json(preset, "settings").get("base_model_name")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(named) if isinstance(named, str) and Path(named).is_absolute() else None  # otherwise a Hub id


def _kohya(folder: Path, names: frozenset[str]) -> Installation | None:
    """Recognize kohya_ss and standalone sd-scripts."""
    if not names & {"kohya_gui.py", "kohya_gui"} and not {"train_network.py", "sdxl_train_network.py"} <= names:
        return None
    try:
        model = read_toml(folder / "config.toml", "settings").get("model")
    except (OSError, ValueError):
        model = None
    named = model.get("models_dir") if isinstance(model, dict) else None
    return _made("kohya_ss", folder, [_within(folder, named if isinstance(named, str) else "models")], [])


def _made(
    tool: Tool, folder: Path, bases: Iterable[Path], loras: Iterable[Path], within: Iterable[Path] = ()
) -> Installation:
    return Installation(tool, folder, _there(bases), tuple(filter(Path.is_dir, _there(loras))), _there(within))


def _there(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the existing paths without duplicates."""
    # normpath, not resolve: a linked folder keeps the path that the user knows.
    unique = {os.path.normcase(os.path.normpath(path)): Path(os.path.normpath(path)) for path in paths}
    return tuple(path for path in unique.values() if _exists(path))


def _exists(path: Path) -> bool:
    try:
        return files.long_path(path).exists()
    except (OSError, ValueError):  # no permission, or an invalid name
        return False


def _within(root: Path, written: str) -> Path:
    return root / os.path.expandvars(os.path.expanduser(written.strip()))  # noqa: PTH111 - as the tools themselves do


def _list(paths: Mapping[str, str], key: str, default: str) -> list[str]:
    """Return the semicolon-separated parts of a SwarmUI setting or, if it is not set, of its default."""
    return [one for one in (paths.get(key) or default).split(";") if one.strip()]


def _fds_section(text: str, section: str) -> Mapping[str, str]:
    """Return the entries of a section in SwarmUI's settings, which are YAML indented with tabs."""
    found: dict[str, str] = {}
    inside = False
    for line in text.splitlines():
        if line[:1] not in ("", "#", "\t"):
            inside = line.rstrip() == f"{section}:"
        elif inside and (entry := _FDS_ENTRY.match(line)):
            found[entry["key"]] = entry["value"].strip()
    return found


def _yaml_table(path: Path) -> Mapping[str, Any]:
    """Return the top-level table of a YAML file, or an empty one if it cannot be read."""
    try:
        return _as_table(parse_yaml(_text(path), path))
    except UnusableFileError:
        return {}


def _as_table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(path: Path) -> str:
    """Return the first 1 MiB of a settings file, or "" if it cannot be read."""
    try:
        with open_file(path, "settings") as file:
            return file.read(_LARGEST).decode("utf-8-sig", errors="replace")
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True, slots=True)
class SearchRoots:
    """Folders to search: `searched` recursively, `asked` without subfolders, `hubs` as Hub caches."""

    searched: tuple[Path, ...] = ()
    asked: tuple[Path, ...] = ()
    hubs: tuple[Path, ...] = ()


def this_pc() -> SearchRoots:
    """Return the folders to search on this PC: home, drives, and the settings folders of tools.

    If $IMPASTO_LOOK_IN is set, its folders, separated as in PATH, are searched instead; none if it is empty.
    """
    chosen = os.environ.get("IMPASTO_LOOK_IN")
    if chosen is not None:
        return SearchRoots(searched=tuple(Path(one) for one in chosen.split(os.pathsep) if one))
    home = Path.home()
    return search_roots(home, os.environ, _drives(home))


def search_roots(home: Path, environment: Mapping[str, str], drives: tuple[Path, ...] = ()) -> SearchRoots:
    """Return the folders to search, given the home folder, environment variables and drives."""
    settings = _settings_folder(home, environment)
    library = library_of_stability_matrix(settings / "StabilityMatrix")
    invoke = environment.get("INVOKEAI_ROOT", "")
    asked = [settings / "ComfyUI", settings / "StabilityMatrix", home / "Documents" / "ComfyUI"]
    asked += [path for path in (library, Path(invoke) if invoke else None) if path]
    return SearchRoots((home, *drives), tuple(asked), tuple(_hubs(home, environment)))


def _settings_folder(home: Path, environment: Mapping[str, str]) -> Path:
    """Return the folder where desktop programs keep their settings; Electron and .NET use the same one."""
    if sys.platform == "darwin":
        return home / "Library" / "Application Support"
    named = environment.get("APPDATA") if sys.platform == "win32" else environment.get("XDG_CONFIG_HOME")
    fallback = home / "AppData" / "Roaming" if sys.platform == "win32" else home / ".config"
    return Path(named) if named else fallback


def _hubs(home: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield the Hub cache folder that huggingface_hub would use, without importing that package."""
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    root = Path(environment.get("HF_HOME") or cache / "huggingface")
    yield Path(environment.get("HF_HUB_CACHE") or root / "hub").expanduser()


def _drives(home: Path) -> tuple[Path, ...]:
    """Return the other local disks of this PC; network drives are left out, since they can hang."""
    if sys.platform == "win32":
        import ctypes

        letters = (Path(f"{letter}:\\") for letter in "CDEFGHIJKLMNOPQRSTUVWXYZ")
        return tuple(one for one in letters if ctypes.windll.kernel32.GetDriveTypeW(str(one)) == _DRIVE_FIXED)
    if sys.platform == "darwin":
        return (Path("/Volumes"),)
    return tuple(mount for mount in _mounts() if mount not in home.parents)


def _mounts() -> Iterator[Path]:
    """Yield the local disks mounted in the usual folders on Linux."""
    usual = (Path("/mnt"), Path("/media"), Path("/run/media"), Path("/data"), Path("/opt"))
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for _, where, kind, *_ in (line.split() for line in lines):
        place = Path(where.replace("\\040", " "))
        if kind not in _REMOTE and any(one == place or one in place.parents for one in usual):
            yield place
