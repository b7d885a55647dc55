"""The Try & export tab: compare a run's saved LoRAs, generate images with them, and export one."""
