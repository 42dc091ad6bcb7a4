"""What is measured on an NVIDIA GPU, by `make gpu`."""
