"""What dialogs have in common."""

from __future__ import annotations

from PySide6.QtWidgets import QDialog, QDialogButtonBox


def close_row(dialog: QDialog) -> QDialogButtonBox:
    """Return a row whose one button closes a dialog in which Enter belongs to something else."""
    row = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
    row.button(QDialogButtonBox.StandardButton.Close).setAutoDefault(False)
    row.rejected.connect(dialog.reject)
    return row
