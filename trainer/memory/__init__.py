"""Forecasts for a job before it starts: memory over time, duration, and the best plan for a GPU."""
