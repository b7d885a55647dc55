"""The libraries that a run's result, memory and time may depend on, and which versions of them are installed."""

from __future__ import annotations

import platform
from importlib import metadata

LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "safetensors",
    "numpy",
    "pillow",
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of each library; "missing" for one that is not installed."""
    return {"python": platform.python_version(), **{name: version_of(name) or "missing" for name in LIBRARIES}}


def version_of(library: str) -> str | None:
    """Return the installed version, read from its metadata without importing it; None when it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
