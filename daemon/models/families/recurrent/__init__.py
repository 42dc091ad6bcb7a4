"""Families of models some of whose layers keep a recurrent state."""
