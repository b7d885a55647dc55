"""Paths and configs of the data shipped with Impasto, in a checkout or an installed wheel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import BaseModelError
from trainer.files.architecture import CHOOSE_A_BASE, NAMES, Config, Family, check_configs
from trainer.protocol import reading
from trainer.protocol.reading import UnusableFileError, parse_json

_PACKAGE = Path(__file__).resolve().parents[1]
EMBEDDED = "impasto.configs"
"""Metadata key under which a single-file base with unusual model sizes stores its configs."""
PARTS: Mapping[Family, tuple[str, ...]] = {
    "sd15": ("unet", "vae", "text_encoder"),
    "sdxl": ("unet", "vae", "text_encoder", "text_encoder_2"),
}
"""Models that each family consists of, named by their subfolders in the diffusers layout."""
_SCHEDULER = "scheduler/scheduler_config.json"


def asset_path(*parts: str) -> Path:
    """Return the path of a bundled file or folder below `assets/`, such as `asset_path("clip", "vocab.json")`.

    Raises FileNotFoundError if it does not exist, which means that the installation is incomplete.
    """
    return _bundled("assets", parts)


def preset_path(*parts: str) -> Path:
    """Return the path of a bundled file or folder below `presets/`; raises FileNotFoundError like `asset_path`."""
    return _bundled("presets", parts)


def _bundled(folder: str, parts: tuple[str, ...]) -> Path:
    # The wheel has both folders inside the package (force-include in pyproject.toml). Looking there first avoids
    # reading a site-packages/assets folder of another project.
    installed = _PACKAGE / f"_{folder}"
    root = installed if installed.is_dir() else _PACKAGE.parent / folder
    path = root.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: this installation of Impasto is incomplete; reinstall it")
    return path


def bundled_configs(family: Family) -> dict[str, Config]:
    """Return the original configs of a family by part ("unet", "vae", "text_encoder", …, "scheduler")."""
    root = asset_path("models", family)
    configs = {part: read_json(root / part / "config.json") for part in PARTS[family]}
    return {**configs, "scheduler": read_json(root / _SCHEDULER)}


def folder_configs(folder: Path) -> tuple[Family, dict[str, Config]]:
    """Return the family and configs of a diffusers folder; raises BaseModelError for anything but SD 1.5 and SDXL.

    A VAE or scheduler config that the folder does not have is missing from the result too.
    """
    pipeline = str(_index(folder).get("_class_name", "pipeline"))
    if not (folder / "unet" / "config.json").is_file():
        sentence = f'"{folder}" contains a {pipeline[:60]} without a UNet: it is neither SD 1.5 nor SDXL.'
        raise BaseModelError("base.other_model", sentence, CHOOSE_A_BASE)
    unet = read_json(folder / "unet" / "config.json")
    family: Family = "sdxl" if unet.get("addition_embed_type") == "text_time" else "sd15"
    configs: dict[str, Config] = {
        part: read_json(folder / part / "config.json")
        for part in PARTS[family]
        if (folder / part / "config.json").is_file()
    }
    check_configs(str(folder), family, configs, bundled_configs(family)["unet"])
    if missing := [part for part in PARTS[family] if part not in configs and part != "vae"]:
        sentence = f'"{folder}" looks like {NAMES[family]}, but {", ".join(missing)}/config.json is missing.'
        raise BaseModelError("base.incomplete", sentence, "Download the whole folder again.")
    if (folder / _SCHEDULER).is_file():
        configs["scheduler"] = read_json(folder / _SCHEDULER)
    return family, configs


def embedded_configs(source: str, text: str) -> tuple[Family, dict[str, Config]]:
    """Return the family and configs in a single file's metadata; raises BaseModelError if they are unusable."""
    try:
        configs = parse_json(text)
        family: Family = configs.pop("family")
        if not all(isinstance(configs[part], dict) for part in (*PARTS[family], "scheduler")):
            raise TypeError("a part is not a table")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        sentence = f'Could not read the configs inside "{source}" ({EMBEDDED}): {error}.'
        raise BaseModelError(
            "base.broken_config", sentence, "Download the file again, or get it from another source."
        ) from error
    check_configs(source, family, configs, bundled_configs(family)["unet"])
    return family, configs


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file; raises BaseModelError if the file is missing, too large or invalid."""
    again = "Download the whole model folder again."
    try:
        value = reading.read_json(path, "config")
    except OSError as error:
        raise BaseModelError("base.incomplete", f'Could not read "{path}": {error.strerror}.', again) from error
    except UnusableFileError as error:
        raise BaseModelError("base.broken_config", f'Could not read "{path}": {error.reason}.', again) from error
    if not isinstance(value, dict):
        raise BaseModelError("base.broken_config", f'Could not read "{path}": it is not a JSON object.', again)
    return value


def _index(folder: Path) -> dict[str, Any]:
    if (folder / "model_index.json").is_file():
        return read_json(folder / "model_index.json")
    singles = sorted(path.name for path in folder.glob("*.safetensors"))
    named = f" It contains {singles[0]}. Specify that file instead." if singles else ""
    raise BaseModelError(
        "base.not_a_folder",
        f'"{folder}" is not a diffusers model: it has no model_index.json.{named}',
        "Specify the folder that contains model_index.json, or a .safetensors file.",
    )
