"""Events, memory figures, the run report, and commands from other processes."""
