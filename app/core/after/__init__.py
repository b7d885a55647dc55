"""Results of a run, without Qt: saved steps to compare, images rendered with them, and export."""
