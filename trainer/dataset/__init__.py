"""Datasets: scanning, checking, bucketing, captions, and the samples of each training step."""
