"""State and logic of the app without its window; never imports Qt, and nothing in the app imports torch."""
