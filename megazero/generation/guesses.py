"""The share of generated tokens that modules of multi-token prediction would have guessed."""

from __future__ import annotations

import torch

from megazero.generation.generate import Text
from megazero.generation.model import InferenceModel


class Guesses:
    """Counts the tokens that modules of multi-token prediction would have guessed, on all ranks."""

    def __init__(self, inference: InferenceModel) -> None:
        self.inference, modules = inference, inference.model.mtp_num_layers
        self.counts = torch.zeros(modules, 2, dtype=torch.float64)

    def add(self, texts: list[Text]) -> None:
        """Count the texts of this rank."""
        for text in texts if len(self.counts) else ():
            found = self.inference.guessed(text.ids, text.num_prompt)
            if found is not None:
                self.counts += found

    def summary(self) -> str:
        """Sum over all ranks. Empty without modules."""
        if not len(self.counts):
            return ""
        mesh = self.inference.mesh
        total = mesh.control_sum(self.counts.to(mesh.device), mesh.dp, mesh.pp)
        shares = ", ".join(f"{float(right / max(1, number)):.0%}" for right, number in total)
        return f"modules of --mtp-num-layers guess {shares} of these tokens"
