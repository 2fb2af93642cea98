"""Property tests draw the same examples in every run: a failure is then the change's, not the draw's."""

from hypothesis import settings

settings.register_profile("subquad", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("subquad")
