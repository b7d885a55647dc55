"""LoRA layers: where they are attached, how they are named, and the files that store them."""
