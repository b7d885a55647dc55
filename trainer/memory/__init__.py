"""What a job will need before it starts: memory over time, duration, and the plan that fits a card."""
