"""App state and logic without the window. It never imports Qt, and no part of the app imports torch."""
