"""The pipe between a daemon and its workers: messages, and both ends."""
