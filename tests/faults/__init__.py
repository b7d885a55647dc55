"""Long fault-injection campaigns; each is a command of its own, described in CONTRIBUTING."""
