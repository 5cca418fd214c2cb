"""The parts of training: data, optimizer, checkpoints, results, and estimates of what it needs."""
