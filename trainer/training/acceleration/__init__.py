"""Ways to make a training step faster, and the measurements that choose among them."""
