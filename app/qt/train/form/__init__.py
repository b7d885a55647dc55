"""The form of all settings, made from the job's schema."""
