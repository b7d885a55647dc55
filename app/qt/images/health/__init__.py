"""Dataset health: problems and charts of the open images, and the crop and mask dialogs."""
