"""Updates of optimizers, a module each. `config.optimizers` has their table; begin with `updates`."""
