"""One loop for all experiments, and what surrounds it: configs, checkpoints, runs on the disk, seeds."""
