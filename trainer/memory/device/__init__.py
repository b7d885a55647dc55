"""Models of a GPU: specs, overheads, calibration and roofline."""
