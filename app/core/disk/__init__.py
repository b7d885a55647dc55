"""Datasets on disk: finding their pictures, hearing of changes, thumbnails, and copying pictures in."""
