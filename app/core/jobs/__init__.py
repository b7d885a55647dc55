"""Edit job files: each change is checked, saved and undoable."""
