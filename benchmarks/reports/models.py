"""Data parallelism alone up to 13B on 128 GPUs (Figure 4), and the paper's worked examples."""

from __future__ import annotations

from benchmarks.reports.blocks import gb, markdown
from benchmarks.reports.rehearsals import Asked, flags_of, rehearse_all, resolved, states
from megazero.plan.parameters import num_parameters

# name, layers, hidden size, heads, samples a GPU, ZeRO stage: figure 4 of the appendix; the baseline is plain DP
FIGURE_4 = [
    ("1.5B", 34, 1920, 16, 24, 2),
    ("2.5B", 54, 1920, 16, 24, 2),
    ("4B", 64, 2304, 24, 16, 2),
    ("6B", 52, 3072, 24, 12, 2),
    ("8B", 72, 3072, 24, 8, 2),
    ("10B", 50, 4096, 32, 6, 2),
    ("11B", 54, 4096, 32, 4, 2),
    ("12B", 58, 4096, 32, 4, 2),
    ("13B", 62, 4096, 32, 2, 2),
    ("1.16B, baseline", 24, 1920, 16, 8, 0),
    ("1.38B, baseline", 40, 1536, 16, 1, 0),
    ("13B, baseline", 62, 4096, 32, 2, 0),
]


def figure_4() -> dict[str, str]:
    """The paper's models on 128 GPUs without model parallelism: what a GPU holds."""
    asked = [
        Asked(128, flags_of(layers, hidden, heads, zero_stage=stage, recompute="full", micro_batch_size=batch))
        for _, layers, hidden, heads, batch, stage in FIGURE_4
    ]
    rows = []
    for (name, layers, hidden, _, batch, _), each, found in zip(FIGURE_4, asked, rehearse_all(asked), strict=True):
        total = num_parameters(resolved(each)[0].model)
        fits = "fits" if found.allocated <= 32e9 else "does not fit"
        kept = found.memory["activation_checkpoints"]
        model = f"{layers} x {hidden} = {total / 1e9:.2f}B"
        rows.append([name, model, batch, gb(states(found.memory)), gb(kept), gb(found.allocated), fits])
    columns = ["paper's name", "layers x hidden", "batch", "states", "checkpoints", "all tensors at once", "in 32 GB"]
    return {"figure 4": markdown(columns, rows)}


def examples() -> dict[str, str]:
    """GPT-2 1.5B at batch 32, and 100B's checkpoints."""
    gpt2 = {"micro_batch_size": 32, "zero_stage": 0}
    large = {"micro_batch_size": 32, "tensor_model_parallel_size": 16, "zero_stage": 2, "recompute": "full"}
    fused, recomputed, whole, parted = rehearse_all(
        [
            Asked(1, flags_of(48, 1600, 16, **gpt2)),
            Asked(1, flags_of(48, 1600, 16, **gpt2, recompute="full")),
            Asked(400, flags_of(125, 8192, 64, **large)),
            Asked(400, flags_of(125, 8192, 64, **large, partition_activations=True)),
        ]
    )

    def activations(found) -> str:
        return gb(found.allocated - states(found.memory))

    inputs = 125 * 32 * 1024 * 8192 * 2
    rows = [
        ["GPT-2 1.5B: model states", "24", "16 Psi", gb(states(fused.memory))],
        [
            "its activations, batch 32, sequence 1024",
            "about 60",
            f"12 h b s L elements of 2 bytes = {gb(12 * 1600 * 32 * 1024 * 48 * 2)}",
            f"{activations(fused)}: no dropout, and attention is fused",
        ],
        [
            "the same with checkpointing",
            "about 8",
            f"2 b s h L = {gb(2 * 32 * 1024 * 1600 * 48)}, and a block",
            activations(recomputed),
        ],
        [
            "100B at batch 32: checkpoints",
            "60 (section 3.2), 33 (6.1)",
            f"2 b s h L = {gb(inputs)}",
            gb(whole.memory["activation_checkpoints"]),
        ],
        [
            "the same with Pa, MP 16",
            "2 (6.1)",
            f"/ 16 = {gb(inputs / 16)}",
            gb(parted.memory["activation_checkpoints"]),
        ],
    ]
    return {"worked examples": markdown(["GB", "the paper", "formula", "rehearsed"], rows)}
