"""What a model, or a baseline, is worth on held-out data."""
