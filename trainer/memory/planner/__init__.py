"""The best fit within a budget."""
