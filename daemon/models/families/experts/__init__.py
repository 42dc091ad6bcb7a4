"""Families of models with experts, of which a router chooses some for each row."""
