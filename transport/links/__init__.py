"""Connections between ranks: how they are made, secured and watched, and what travels on them."""
