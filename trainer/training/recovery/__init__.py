"""Step down to a smaller plan when memory runs out, and continue."""
