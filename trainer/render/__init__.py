"""Image generation with a base and finished LoRAs, run in a separate process."""
