"""The pictures that a run draws of what it has learned so far."""
