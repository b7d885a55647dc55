"""Problems, charts and crops of the open images."""
