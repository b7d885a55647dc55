"""Real but tiny material that the tests share."""
