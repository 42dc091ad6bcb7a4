"""The adapters of a session: which is in which slot, what ranks tell each other of them, where their files are."""
