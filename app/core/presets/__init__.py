"""Presets: the library, receiving new ones, and their cost on a GPU."""
