"""The charts of a run, painted with QPainter from numpy arrays; numpy loads after the window opens."""
