"""Commands about models: what there is on the hub and on this disk, and what fits."""
