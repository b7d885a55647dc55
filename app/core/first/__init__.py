"""What a first start shows: this PC, whether training works on it, and the demo."""
