"""What is measured, a file for each measurement, in a room for what it is about."""
