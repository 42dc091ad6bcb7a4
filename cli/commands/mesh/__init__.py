"""Commands about the whole mesh: who is in it, who does what, and who may."""
