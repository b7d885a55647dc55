"""Find the best fit within a memory budget."""
