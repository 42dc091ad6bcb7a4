"""Models of real shapes with random weights, to measure without a download."""
