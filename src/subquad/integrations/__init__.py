"""Subquad inside other frameworks: one package for each, which is imported only on request."""
