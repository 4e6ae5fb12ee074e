"""Data parallelism alone up to 13B on 128 GPUs (Figure 4), and the paper's worked examples."""

from benchmarks.reports.blocks import gb, markdown
from benchmarks.reports.published import FIGURE_4, FIGURE_4_BASELINE
from benchmarks.reports.rehearsals import Asked, flags_of, rehearse_all, resolved, states
from megazero.engine.model.stage import declare
from megazero.planner.parameter_counts import num_parameters


def figure_4() -> dict[str, str]:
    """The paper's models on 128 GPUs without model parallelism: bytes on a GPU."""
    plain = [*FIGURE_4_BASELINE, FIGURE_4[-1]]  # data parallelism alone, and a model that does not fit
    runs = [(run, run.model, 2) for run in FIGURE_4] + [(run, f"{run.model}, baseline", 0) for run in plain]
    asked = [
        Asked(
            run.gpus,
            flags_of(
                run.layers,
                run.hidden,
                run.heads,
                zero_stage=stage,
                recompute="full",
                micro_batch_size=run.micro_batch,
            ),
        )
        for run, _, stage in runs
    ]
    rows = []
    for (run, name, _), each, found in zip(runs, asked, rehearse_all(asked), strict=True):
        total = num_parameters(declare(resolved(each)[0].model))
        fits = "fits" if found.allocated <= 32e9 else "does not fit"
        kept = found.memory["activation_checkpoints"]
        model = f"{run.layers} x {run.hidden} = {total / 1e9:.2f}B"
        rows.append([name, model, run.micro_batch, gb(states(found.memory)), gb(kept), gb(found.allocated), fits])
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
