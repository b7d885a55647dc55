"""Training: the one step, the loop around it, caches, checkpoints, previews, validation."""
