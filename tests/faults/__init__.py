"""Long campaigns against faults; each is a command of its own, described in CONTRIBUTING."""
