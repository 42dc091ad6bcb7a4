"""The daemon: a node's control process."""
