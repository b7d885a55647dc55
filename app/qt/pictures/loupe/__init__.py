"""One picture, large."""
