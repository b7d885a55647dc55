"""What the engine forecasts for a job, asked live while its settings change."""
