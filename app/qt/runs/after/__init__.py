"""The Try & export tab: compare saved LoRAs, generate images with them, and export one."""
