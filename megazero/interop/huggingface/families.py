"""Choose the class of transformers that computes a model."""

from megazero.engine.options.model_options import ModelOptions
from megazero.families import MODELS
from megazero.families.parts.model_types import HuggingFaceModel
from megazero.flags.flag_names import as_flag


def family_of(model: ModelOptions, source_type: str = "") -> HuggingFaceModel:
    """Return the row that computes the same as `model`: that of its source, of its family, or another.

    Args:
        source_type: model_type of the config.json from which the model came.

    Raises:
        ValueError: none computes it.
    """
    own = [each for each in MODELS.values() if each.architecture == model.architecture]
    first = [MODELS[source_type]] if source_type in MODELS else []
    refused = None
    for found in [*first, *own, *MODELS.values()]:
        if not found.differences(model):
            try:
                found.converted(model)
            except ValueError as error:  # DeepSeek-V3 has dense layers at the start alone, GLM-4.7-Flash anywhere
                refused = refused or error
            else:
                return found
    if refused:
        raise refused
    if not own:
        raise ValueError(
            f"--architecture {model.architecture} has no table that converts it to Hugging Face; see docs/extending.md"
        )
    flags = [as_flag(name.replace("_", "-"), getattr(model, name)) for name in own[0].differences(model)]
    raise ValueError(f"no model of Hugging Face is a {own[0].model_type} with {', '.join(flags)}")
