"""What a LoRA file says of itself, and where in a model it acts how strongly; all of it comes from strangers."""
