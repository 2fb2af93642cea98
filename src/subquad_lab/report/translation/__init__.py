"""Formulas of the library as JavaScript, so that the page computes what Python computes and nothing is typed in twice.

    program        the functions, classes and constants that a few functions use, found through their modules
    statements     the body of a function
    expressions    what a statement computes

`assets/python.js` has Python's operators and builtins, where JavaScript's differ. Python outside the subset that
formulas need raises `Untranslatable`, with its place.
"""
