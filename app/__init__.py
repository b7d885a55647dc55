"""The desktop app: pictures and captions, and what the trainer makes of them."""
