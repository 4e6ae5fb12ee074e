"""The share of generated tokens that modules of multi-token prediction would have guessed."""

import torch

from megazero.generation.generate import Text
from megazero.generation.model import InferenceModel


class Guesses:
    """Collects the texts of this rank, and then counts the guesses of the modules."""

    def __init__(self, inference: InferenceModel) -> None:
        self.inference = inference
        self.texts: list[Text] = []

    def summary(self) -> str:
        """Compute each text once more, and sum over all ranks; all ranks call this."""
        mesh, counts = self.inference.mesh, torch.zeros(self.inference.model.mtp_num_layers, 2, dtype=torch.float64)
        for text in self.texts:
            found = self.inference.guessed(text.ids, text.num_prompt)
            if found is not None:
                counts += found
        total = mesh.control_sum(counts.to(mesh.device), mesh.dp, mesh.pp).tolist()
        shares = ", ".join(f"{right / number:.0%}" if number else "none" for right, number in total)
        return f"modules of --mtp-num-layers guess {shares} of these tokens"
