"""What comes after a run: its candidates side by side, pictures from them, and the file that goes out."""
