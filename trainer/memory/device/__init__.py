"""What a GPU is and can do: specs, overheads, calibration, roofline."""
