"""All that a program or a rank of a test imports sooner or later: the fork server imports it once.

A run of a tiny model takes three times the CPU time without: autograd alone imports sympy, at its first backward.
"""

import atexit
import gc
import importlib
import pkgutil

import megazero

OWN = [module.name for module in pkgutil.walk_packages(megazero.__path__, "megazero.")]
OTHERS = "torch._subclasses.fake_tensor torch.fx.experimental.symbolic_shapes numpy.ma jinja2 tyro pytest".split()
MODELS = "transformers.models"  # those of a config.json and of a tokenizer's folder
THEIRS = [f"{MODELS}.auto.tokenization_auto", f"{MODELS}.auto.modeling_auto", f"{MODELS}.llama.configuration_llama"]

for name in [*OWN, *OTHERS, *THEIRS, "pretrain_gpt"]:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # a collection in a forked process then neither looks at these objects nor copies their pages
atexit.register(gc.unfreeze)  # else Triton's bindings report leaks
