"""Impasto's engine: trains SD 1.5 and SDXL LoRAs, headless."""

__version__ = "0.1.0"
