"""Presets: the library, receiving new ones, and forecasts of their time and memory on a GPU."""
