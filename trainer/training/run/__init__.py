"""Starting and resuming runs, and one attempt at a run."""
