"""Parts of a model: attention, MLP, norms, positions, the vocabulary, and the context that they share."""
