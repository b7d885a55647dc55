"""Draws pictures with a base and finished LoRAs, in a process of its own."""
