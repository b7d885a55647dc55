"""What the user changes: edits with undo, a journal that outlives crashes, and the writer that brings them to disk."""
