"""What happens at given steps: checkpoints, exports, previews, validation, events."""
