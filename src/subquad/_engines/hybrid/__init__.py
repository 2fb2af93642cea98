"""The engine of `Hybrid`: exact softmax over near keys and features of far keys, in one normalization."""
