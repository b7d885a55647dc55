"""Bases and LoRA folders of other tools already on this PC."""
