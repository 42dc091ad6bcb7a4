"""Measurements of training: its memory and time, and where its parts are put."""
