"""What a model is: its description, from the keys of its files; how it is cut; a rank's graph of it."""
