"""How fast ranks of this machine are, and what their time goes to."""
