"""The charts of a run: drawn by pyqtgraph, which is loaded when the first is to be seen."""
