"""`motley bench`: a file for each measurement that a user can run."""
