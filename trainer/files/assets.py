"""Finds the data that ships with Impasto, from a checkout and from an installed wheel alike."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def asset_path(*parts: str) -> Path:
    """Return the path of a bundled file or folder below `assets/`, such as `asset_path("clip", "vocab.json")`.

    Raises FileNotFoundError when it does not exist: that is a broken installation, never the user's input.
    """
    return _bundled("assets", parts)


def preset_path(*parts: str) -> Path:
    """Return the path of a bundled file or folder below `presets/`; raises FileNotFoundError like `asset_path`."""
    return _bundled("presets", parts)


def _bundled(folder: str, parts: tuple[str, ...]) -> Path:
    # The wheel keeps both folders inside the package (see force-include in pyproject.toml); asking there first
    # means that a stray site-packages/assets of another project is never read.
    installed = _PACKAGE / f"_{folder}"
    root = installed if installed.is_dir() else _PACKAGE.parent / folder
    path = root.joinpath(*parts)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: this installation of Impasto is not complete, install it again")
    return path
