"""The forecast panel beside a job: its GPU memory, its duration and alternative plans."""
