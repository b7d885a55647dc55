"""Finding pictures: the filter box above them, and the panel of tags beside them."""
