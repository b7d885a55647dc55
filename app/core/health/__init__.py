"""What is wrong or doubtful with the open datasets, found while one works; see health.py."""
