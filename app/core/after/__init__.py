"""What comes after a run, without Qt: its candidates, pictures drawn with them, and the file that goes out."""
