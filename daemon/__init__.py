"""One machine's part in a mesh: the daemon that controls, and the workers that compute."""
