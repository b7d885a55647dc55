"""What the app remembers of its user: preferences, and how the window stood."""
