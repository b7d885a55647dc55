"""First-run experience: the welcome dialog, and a tour that uses the demo."""
