"""Image generation with a base and finished LoRAs, in a separate process."""
