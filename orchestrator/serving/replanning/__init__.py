"""Sessions that get another plan: after a loss, for a lease, to be quicker."""
