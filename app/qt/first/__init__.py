"""What a new user meets: the welcome, and a tour with the demo."""
