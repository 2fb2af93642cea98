"""Modules: multi-head attention with a choice of method, and the replacement of attention inside a model."""
