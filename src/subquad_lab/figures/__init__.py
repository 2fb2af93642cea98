"""Confidence intervals, metrics, tables and plots."""
