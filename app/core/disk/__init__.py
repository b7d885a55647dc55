"""Datasets on disk: scanning folders, watching for changes, thumbnails, and importing images."""
