"""Add Impasto to the desktop or application menu: `python -m app.shortcut`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from trainer.errors import ImpastoError

ROOT = Path(__file__).resolve().parents[1]
ICONS = Path(__file__).resolve().parent / "qt" / "icons"
_SCRIPT = """
$ErrorActionPreference = 'Stop'
$shell = New-Object -ComObject WScript.Shell
$link = $shell.CreateShortcut((Join-Path $shell.SpecialFolders.Item('Desktop') 'Impasto.lnk'))
$link.TargetPath = $env:IMPASTO_PYTHON
$link.Arguments = '-m app'
$link.WorkingDirectory = $env:IMPASTO_ROOT
$link.IconLocation = $env:IMPASTO_ICON
$link.Save()
"""


def main() -> int:
    """Create the shortcut and print its path; return the exit code."""
    try:
        place = windows_shortcut() if sys.platform == "win32" else menu_entry()
    except ImpastoError as error:
        print(f"{error.sentence}\nWhat to do: {error.remedy}", file=sys.stderr)
        return error.exit_code
    print(f"Created {place}.")
    return 0


def menu_entry() -> str:
    """Write impasto.desktop for the application menu on Linux; raise ImpastoError if that fails."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    target = Path(data) / "applications" / "impasto.desktop"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(desktop_entry(sys.executable, ROOT), encoding="utf-8")
    except OSError as error:
        raise ImpastoError(
            "shortcut.written",
            f"Could not write {target}: {error.strerror or error}.",
            "Start Impasto with start.sh instead.",
        ) from error
    return f"an entry in your application menu ({target})"


def desktop_entry(python: str, root: Path) -> str:
    """Return the text of a .desktop file, quoted as in freedesktop.org's Desktop Entry Specification 1.5."""
    quoted = re.sub(r'(["`$\\])', r"\\\1", python).replace("%", "%%")
    lines = {
        "Type": "Application",
        "Version": "1.5",
        "Name": "Impasto",
        "Comment": "Images, captions and LoRA training",
        "Exec": f'"{quoted}" -m app %F',
        "Path": str(root),
        "Icon": str(ICONS / "impasto.svg"),
        "Terminal": "false",
        "Categories": "Graphics;",
        "MimeType": "inode/directory;",
        "StartupWMClass": "impasto",
    }
    # Every value needs its backslashes escaped, in addition to the quoting inside Exec.
    escaped = (f"{key}={value}".replace("\\", "\\\\").replace("\n", "\\n") for key, value in lines.items())
    return "\n".join(["[Desktop Entry]", *escaped, ""])


def windows_shortcut() -> str:
    """Create Impasto.lnk on the desktop with PowerShell; raise ImpastoError if that fails."""
    # Paths are passed in environment variables, so that PowerShell never parses them as code.
    places = {
        "IMPASTO_PYTHON": str(Path(sys.executable).with_name("pythonw.exe")),
        "IMPASTO_ROOT": str(ROOT),
        "IMPASTO_ICON": str(ICONS / "impasto.ico"),
    }
    command = ["powershell", "-NoProfile", "-NonInteractive", "-ExecutionPolicy", "Bypass", "-Command", _SCRIPT]
    environment = {**os.environ, **places}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
        fault = done.stderr.decode("utf-8", "replace").strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = str(error)
    if fault:
        raise ImpastoError(
            "shortcut.made", f"Could not create the shortcut: {fault}", "Start Impasto with Start.bat instead."
        )
    return "a shortcut on your desktop"


if __name__ == "__main__":
    sys.exit(main())
