"""The engine of `Window` and `BlockSparse`: exact softmax over some of the pairs."""
