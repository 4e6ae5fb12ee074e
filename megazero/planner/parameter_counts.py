"""Numbers of a model's parameters, from its declarations. Pure."""

import math

from megazero.engine.plan.layout.layers import Layers


def num_parameters(layers: Layers) -> int:
    """Count the elements of the whole model, each parameter once, padding excluded."""
    return sum(math.prod(s.shape) for kind in layers.kinds.values() for s in kind.params)


def active_parameters(layers: Layers) -> int:
    """Count the elements that a token passes: of a mixture of experts, those of its experts alone."""
    return sum(s.active for kind in layers.kinds.values() for s in kind.params)
