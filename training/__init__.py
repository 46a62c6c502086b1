"""Training: how the bundled models are made, from drawn scenes to saved weights."""
