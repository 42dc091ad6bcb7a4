"""What ranks and expert hosts do alike before they serve: the model is found, shares are made, life is told."""
