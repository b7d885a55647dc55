"""Events, memory figures, the report, and commands from outside."""
