"""LoRA layers: where they attach, what they are called, and the files they travel in."""
