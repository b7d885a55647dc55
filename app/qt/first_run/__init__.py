"""First-run experience: the welcome dialog, and a tour with the demo."""
