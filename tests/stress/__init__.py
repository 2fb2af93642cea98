"""Randomized stress tests: `make torture` runs them for a time budget, tests/test_torture.py a few cases of each."""
