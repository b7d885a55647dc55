"""The desktop app: datasets, captions, training and its results."""
