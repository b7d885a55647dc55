"""What makes a step faster, and the measurements that choose it."""
