"""The training loop of all experiments, with configs, checkpoints, run folders and seeds."""
