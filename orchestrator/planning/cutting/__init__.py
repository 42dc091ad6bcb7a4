"""Units of a model, given to ranks as shares."""
