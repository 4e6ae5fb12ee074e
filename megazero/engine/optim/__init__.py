"""Updates of optimizers, one module each. `engine.options.optimizers` has their table. Begin with `updates`."""
