"""Finding images: the filter box above them, and the tag panel beside them."""
