"""Collectives as schedules of messages: which there are, how long they take, and how a rank carries one out."""
