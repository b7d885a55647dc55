"""Runs as they are watched: which there are, how they stand, and what one of them learned so far."""
