"""Attention by gathering: every rank gets all keys and values. The volume grows with the length.

For `Multipole`, whose queries read few keys but choose them among all blocks. Exchanging moments and then only the
keys that are chosen does not pay: the queries of a rank choose nearly every block at least once.
"""
