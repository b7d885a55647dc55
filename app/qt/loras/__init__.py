"""The viewer of LoRA files."""
