"""What is shown of measurements: pictures, the standard set, pages."""
