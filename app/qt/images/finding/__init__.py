"""Tools for finding images: the filter box above them, and the tag panel to their left."""
