"""Live forecasts of a job while its settings change."""
