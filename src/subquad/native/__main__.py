"""`python -m subquad.native` prints whether the kernels are used, with which instruction set, and why."""

from subquad.native import status

print(status())
