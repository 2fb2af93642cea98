"""Subquad inside other frameworks: one file for each, imported only by those who ask for it."""
