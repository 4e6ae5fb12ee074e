"""Parts of which families are made: names of tensors, conversions of weights and options. Begin with `family`."""
