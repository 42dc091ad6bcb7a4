"""Families of models in which every row goes through every weight."""
