"""The charts of a run, painted with QPainter from numpy arrays; numpy is imported after the window opens."""
