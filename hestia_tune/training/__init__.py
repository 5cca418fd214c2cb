"""Training: plan a run, build its model, train it, and save checkpoints and results."""
