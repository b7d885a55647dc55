"""Read jobs from the files of other trainers, and report what becomes of each of their settings."""
