"""Parts of a model: what they are built with, attention, MLP, norms, positions, the vocabulary."""
