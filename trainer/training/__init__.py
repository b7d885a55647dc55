"""Training: the step, the loop around it, caches, checkpoints, previews and validation."""
