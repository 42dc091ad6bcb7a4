"""The changes, in order; what is published is never changed, a new one follows."""
