"""Find missing system libraries that Qt needs on Linux. Imports only the standard library."""

from __future__ import annotations

import ctypes
import shutil
import sys
from collections.abc import Sequence

# Library: the Debian and Ubuntu package that provides it.
ALWAYS = {
    "libEGL.so.1": "libegl1",
    "libGL.so.1": "libgl1",
    "libX11.so.6": "libx11-6",
    "libxkbcommon.so.0": "libxkbcommon0",
    "libfontconfig.so.1": "libfontconfig1",
    "libfreetype.so.6": "libfreetype6",
    "libdbus-1.so.3": "libdbus-1-3",
    "libglib-2.0.so.0": "libglib2.0-0",
    "libgssapi_krb5.so.2": "libgssapi-krb5-2",
    "libbrotlidec.so.1": "libbrotli1",
    "libzstd.so.1": "libzstd1",
}
ON_X = {
    "libxcb-cursor.so.0": "libxcb-cursor0",
    "libxcb-icccm.so.4": "libxcb-icccm4",
    "libxcb-image.so.0": "libxcb-image0",
    "libxcb-keysyms.so.1": "libxcb-keysyms1",
    "libxcb-randr.so.0": "libxcb-randr0",
    "libxcb-render-util.so.0": "libxcb-render-util0",
    "libxcb-shape.so.0": "libxcb-shape0",
    "libxcb-xkb.so.1": "libxcb-xkb1",
    "libxkbcommon-x11.so.0": "libxkbcommon-x11-0",
}


def missing_libraries(screen: bool) -> list[str]:
    """Return the libraries that Qt needs (with `screen`, also those for X11) but cannot load; [] except on Linux."""
    if not sys.platform.startswith("linux"):
        return []
    return [name for name in (*ALWAYS, *(ON_X if screen else ())) if not _loads(name)]


def install_command(missing: Sequence[str]) -> str:
    """Return the command that installs these libraries, or a hint if the package manager is unknown."""
    packages = {**ALWAYS, **ON_X}
    capabilities = " ".join(f"'{name}()(64bit)'" for name in missing)
    commands = {
        "apt-get": "sudo apt-get install " + " ".join(packages[name] for name in missing),
        "dnf": f"sudo dnf install {capabilities}",
        "zypper": f"sudo zypper install {capabilities}",
        "pacman": "sudo pacman -S qt6-base xcb-util-cursor",
    }
    found = (command for tool, command in commands.items() if shutil.which(tool))
    return next(found, "use your system's package manager")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
