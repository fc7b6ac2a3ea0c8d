"""Training functions: gradients, losses, optimizers, precision."""
