"""Updates by the name of their rule in `options.optimizers`. A new one needs a module, a line here and a rule there."""

from megazero.engine.optim import adamw, lion, muon
from megazero.engine.optim.step import UpdateFunction

UPDATES: dict[str, UpdateFunction] = {"adamw": adamw.update, "lion": lion.update}
MATRIX_UPDATES = {"muon": muon.update}
