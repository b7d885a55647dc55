"""Settings that the app keeps: preferences, recent folders and the state of the window."""
