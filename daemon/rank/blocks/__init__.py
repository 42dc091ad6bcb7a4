"""The blocks of a rank's KV caches: which hold what, and where those are that are not in its engine's memory."""
