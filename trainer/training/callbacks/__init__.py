"""Callbacks of the training loop: checkpoints, exports, previews, validation, events."""
