"""What training takes of memory and time, and who should train what."""
