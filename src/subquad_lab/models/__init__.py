"""The models of the experiments."""
