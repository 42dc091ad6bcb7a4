"""What people type: options, durations, sizes."""
