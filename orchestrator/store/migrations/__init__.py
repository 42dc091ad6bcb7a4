"""How the tables of an earlier Motley become those of this one, a file for each change, as Alembic runs them."""
