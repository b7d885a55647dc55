"""The charts of a run, painted with QPainter from numpy's arrays; numpy is loaded after the window has opened."""
