"""Two to four pictures side by side."""
