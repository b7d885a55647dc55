"""Shows files and folders in the system's own file manager."""

from __future__ import annotations

import sys
from pathlib import Path

from PySide6.QtCore import QProcess, QUrl
from PySide6.QtGui import QDesktopServices


def open_folder(folder: Path) -> bool:
    """Open a folder; tell whether the system could be asked to."""
    return QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder)))


def reveal(file: Path) -> bool:
    """Open the folder of a file with the file selected, where the system can; else the folder alone."""
    if sys.platform == "win32":
        return QProcess.startDetached("explorer.exe", ["/select,", str(file)])[0]
    if sys.platform == "darwin":
        return QProcess.startDetached("open", ["-R", str(file)])[0]
    return open_folder(file.parent)
