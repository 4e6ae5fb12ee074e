"""Updates of optimizers, one module each. `config.optimizers` has their table. Begin with `updates`."""
