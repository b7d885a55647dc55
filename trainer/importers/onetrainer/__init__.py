"""Read jobs and datasets from the files of OneTrainer."""
