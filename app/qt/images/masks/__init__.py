"""The mask painter."""
