"""All that a program or a rank of a test imports sooner or later: the fork server imports it once.

A run of a tiny model takes three times the CPU time without.
"""

import atexit
import gc
import importlib
import pkgutil

import megazero
from megazero.flags.cli import parse
from megazero.observe.report.page import template
from tests.helpers.parsers import remember_parsers

OWN = [module.name for module in pkgutil.walk_packages(megazero.__path__, "megazero.")]
LIBRARIES = "torch._subclasses.fake_tensor numpy.ma numpy.random jinja2 tyro pytest".split()
COMPILER = "torch._dynamo"  # a mode of dispatch has torch import it, with sympy
MODELS = "auto.tokenization_auto auto.modeling_auto llama.configuration_llama".split()  # of a Hugging Face folder

OURS = ["pretrain_gpt", "tests.parallel.test_pretended_gpu"]

for name in [*OWN, COMPILER, *LIBRARIES, *(f"transformers.models.{name}" for name in MODELS), *OURS]:
    importlib.import_module(name)
remember_parsers()
parse(["--num-layers", "1"])  # a program whose defaults are those of no preset finds its parser
template()
gc.collect()
gc.freeze()  # a collection in a forked process then neither looks at these objects nor copies their pages
atexit.register(gc.unfreeze)  # else Triton's bindings report leaks
