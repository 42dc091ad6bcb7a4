"""The worker processes that this node holds."""
