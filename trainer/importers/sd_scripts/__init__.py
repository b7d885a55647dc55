"""Read jobs from the files and command lines of kohya's sd-scripts."""
