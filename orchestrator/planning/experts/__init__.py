"""Where a model's experts are to be, and how many replicas of each."""
