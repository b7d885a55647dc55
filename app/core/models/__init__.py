"""Bases and LoRA folders that are on this PC already, where the user's other tools keep them."""
