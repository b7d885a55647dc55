"""Inspection of LoRA files: their metadata, which is untrusted, and their strength in each block of the model."""
