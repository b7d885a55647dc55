"""User edits: undo history, a crash-safe journal, and the writer that saves them to disk."""
