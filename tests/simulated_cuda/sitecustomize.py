"""Load the simulated device in every Python process that a test starts (see `tiny`)."""

import simulated_cuda

if simulated_cuda.is_requested():
    simulated_cuda.load()
