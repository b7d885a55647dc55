"""The grid of pictures: where each lies, how it is painted, and how it is moved about in."""
