"""Blocks with a recurrent state, as families have them."""
