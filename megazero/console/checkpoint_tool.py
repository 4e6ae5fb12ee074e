"""List, verify and show checkpoints; export them to Hugging Face, and import models from there; add experts; merge.

examples:
  python scripts/checkpoint.py list runs/a
    list every checkpoint of a folder, and mark the one that a resume loads
  python scripts/checkpoint.py verify runs/a
    read and check every byte; exit code 1 if any is damaged
  python scripts/checkpoint.py show runs/a/iter_0000100
    show the run, its layout, its tensors
  python scripts/checkpoint.py export --to hf --output exports/a runs/a
    write a folder for transformers' from_pretrained
  python scripts/checkpoint.py import --from hf exports/a --output runs/b
    write weights for --load runs/b --finetune
  python scripts/checkpoint.py upcycle --load runs/a --save runs/c --num-experts 8
    write weights of a model whose experts are copies of the MLPs of runs/a
  python scripts/checkpoint.py merge --weights decay runs/m runs/a/iter_0000600 runs/a/iter_0000700 runs/a/iter_0000800
    write weights that stand for a decay of the learning rate over the last 200 iterations
"""

import datetime
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from data_tools.tool import progress_bar
from megazero import checkpoint
from megazero.called_as import in_own_words, program_name
from megazero.checkpoint import verify
from megazero.checkpoint.manifest import MANIFEST, read_manifest, unchecked_state
from megazero.checkpoint.others import refuse_other
from megazero.data.tokenizer import Tokenizer
from megazero.engine.model.stage import declare
from megazero.files import explain
from megazero.flags.config import BYTES
from megazero.flags.help import with_whole_lines
from megazero.optional import missing_package
from megazero.run.run_state import RunState, other_folder, tokenizer_for
from megazero.units import size


@dataclass(frozen=True)
class List:
    """List the checkpoints of a folder: size, layout, and the one that a resume loads. Checks names and lengths."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of checkpoints: the --save of a run."""


@dataclass(frozen=True)
class Verify:
    """Read and check every byte. Prints a sentence for each fault; then the exit code is 1."""

    folder: Annotated[Path, tyro.conf.Positional]
    """One iter_NNNNNNN, or a folder of them: then all are checked."""


@dataclass(frozen=True)
class Show:
    """Show a checkpoint: the run, its layout, its tensors."""

    folder: Annotated[Path, tyro.conf.Positional]
    """One iter_NNNNNNN, or a folder of them: then the one that a resume loads."""


@dataclass(frozen=True)
class Export:
    """Write a checkpoint of any layout as a model of another library. Few tensors are in memory at once."""

    folder: Annotated[Path, tyro.conf.Positional]
    """One iter_NNNNNNN, or a folder of them: then the one that a resume loads."""
    output: Path
    """Folder to make: it appears whole or not at all."""
    to: Literal["hf"] = "hf"
    """hf: a Hugging Face model: safetensors, config.json, generation_config.json and the tokenizer."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the weights."""
    weights: Literal["model", "ema"] = "model"
    """model: the weights. ema: their running average, of a run with --ema-interval."""
    max_shard_size: float = 5.0
    """GiB per safetensors file at most; a single tensor may be larger."""
    tokenizer: str = ""
    """Tokenizer to write next to the weights, as --tokenizer of pretrain_gpt.py. Empty: the run's own, from the
    checkpoint. none: no tokenizer."""


@dataclass(frozen=True)
class Import:
    """Write another library's model as a checkpoint of weights alone, from which --load starts a run."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of the model: config.json, safetensors and, if there is one, the tokenizer."""
    output: Path
    """Folder of checkpoints to make: it appears whole or not at all."""
    source: Annotated[Literal["hf"], tyro.conf.arg(name="from")] = "hf"
    """hf: a Hugging Face model."""


@dataclass(frozen=True)
class Upcycle:
    """Write a dense checkpoint as one with experts, from which --load starts a run. Its first loss is the dense one's.

    Every expert is a copy of the MLP in its place. Routers and optimizer states are initialised.
    """

    load: Path
    """One iter_NNNNNNN, or a folder of them: then the one that a resume loads."""
    save: Path
    """Folder of checkpoints to make: it appears whole or not at all."""
    num_experts: int
    """Experts of a layer, as --num-experts of pretrain_gpt.py."""
    moe_router_topk: int = 2
    """Experts of a token. Other flags of routers are given to the run that loads the checkpoint."""
    moe_router_pre_softmax: bool = False
    """Refused, because the weights of a token's experts would not add up to 1."""
    moe_layer_freq: str = "1"
    """Layers that get experts, as --moe-layer-freq of pretrain_gpt.py."""
    seed: int = 1234
    """Seed of the routers' initial weights."""


@dataclass(frozen=True)
class Merge:
    """Write the weighted sum of the weights of checkpoints, of any layouts, as a checkpoint of weights alone.

    Sums are in fp64. Few tensors are in memory at once. Optimizer states are not merged, because moments estimate the
    gradients at their own weights: --load starts a new run from the merged weights.
    """

    output: Annotated[Path, tyro.conf.Positional]
    """Folder of checkpoints to make: it appears whole or not at all."""
    checkpoints: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Each one iter_NNNNNNN, or a folder of them: then the one that a resume loads."""
    weights: str = "mean"
    """mean: equal. decay: as if the learning rate had decayed to 0 between the first and the last checkpoint, which are
    of a run with a constant one. W1,W2,...: a number for each checkpoint, with the sum 1."""
    decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """--weights decay: its shape, as --lr-wsd-decay-style of pretrain_gpt.py."""


def printed(rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table; the first row is its head."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def layout_of(state: dict[str, object]) -> str:
    """Return `pp 2 x dp 4 x tp 1`, as far as the state has it; of cp, ep and expert_tp, those that divide anything."""
    layout = state.get("layout")
    if not isinstance(layout, dict):
        return "?"
    shown = {"pp": None, "dp": None, "cp": 1, "tp": None, "ep": 1, "expert_tp": 0}  # axis -> the value that is left out
    return " x ".join(f"{k} {layout[k]}" for k, usual in shown.items() if k in layout and layout[k] != usual)


def folders(folder: Path) -> list[Path]:
    """Return the checkpoints that `folder` means. ValueError if there are none."""
    if (folder / MANIFEST).exists():
        return [folder]
    found = checkpoint.checkpoints(folder)
    if not any((each / MANIFEST).exists() for each in found):
        refuse_other("the folder", folder)
    if not found and folder.name.startswith("iter_"):
        return [folder]  # a damaged one
    if not found:
        raise ValueError(f"{folder} holds no checkpoint; {other_folder(folder)}")
    return found


def found_checkpoint(folder: Path) -> Path:
    """Return the checkpoint that `folder` means. ValueError if there is none."""
    path = checkpoint.find(folder)
    if path is None:
        raise ValueError(f"{folder} holds no checkpoint; {other_folder(folder)}")
    return path


def list_checkpoints(options: List) -> int:
    found = folders(options.folder)
    try:
        chosen, said = checkpoint.find(options.folder), ""
    except ValueError as error:
        chosen, said = None, str(error)
    rows = [("checkpoint", "saved", "size", "layout", "samples", "state")]
    for path in found:
        state = unchecked_state(path)
        files = [file.stat() for file in path.rglob("*") if file.is_file()]
        saved = datetime.datetime.fromtimestamp(max((f.st_mtime for f in files), default=0)).isoformat(" ", "seconds")
        try:
            kind = "" if checkpoint.find(path) else "?"
        except checkpoint.Damaged as error:
            kind = f"NOT WHOLE: {str(error).split(': ', 1)[-1]}"
        except ValueError as error:  # it has another name, or is of another system
            kind = f"NOT LOADED: it {str(error).removeprefix(f'--load {path} ')}"
        kind += "not sound: skipped iterations before it" if not kind and state.get("sound") is False else ""
        kind += " <- a resume starts here" if path == chosen else ""
        samples = state.get("consumed_samples", "?")
        rows.append(
            (path.name, saved, size(sum(f.st_size for f in files)), layout_of(state), str(samples), kind.strip())
        )
    printed(rows)
    if said:
        print(said, file=sys.stderr)
    return 1 if said else 0


def verify_checkpoints(options: Verify) -> int:
    bad = 0
    for path in folders(options.folder):
        faults = list(verify.faults(path))
        print(f"{path}: {'DAMAGED' if faults else 'whole'}")
        for fault in faults:
            print(f"  {fault}")
        bad += bool(faults)
    return 1 if bad else 0


def show_checkpoint(options: Show) -> int:
    path = found_checkpoint(options.folder)
    state, manifest = RunState.read(path), read_manifest(path)
    model = " ".join(f"{key.replace('_', '-')}={value}" for key, value in state.model.items())
    parameters = sum(prod(e.shape) for name, e in manifest.tensors.items() if name.startswith("model."))
    print(f"{path}")
    print(
        f"iteration {state.iteration}, {state.consumed_samples:,} samples, {state.updates:,} updates, run {state.run}"
    )
    files = f"{len(manifest.files)} files, {size(sum(manifest.files.values()))}"
    print(f"layout {layout_of({'layout': state.layout})}, {files}")
    print(f"tokenizer: {state.tokenizer(path) if state.saved_tokenizer else 'not in the checkpoint'}")
    print(f"model of {parameters:,} parameters: {model}\n")
    rows = [("tensor", "dtype", "shape", "chunks", "size")]
    for name, entry in manifest.tensors.items():
        chunks = manifest.chunks(name)
        volume = sum(chunk.region.volume for chunk in chunks)
        width = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "uint8": 1}.get(entry.dtype, 2)
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        rows.append((name, entry.dtype, shape, str(len(chunks)), size(volume * width)))
    printed(rows)
    return 0


def tokenizer_of(spec: str, state: RunState, path: Path, vocab_size: int) -> Tokenizer | None:
    """Return the tokenizer of an export; None if neither a flag nor the run names one."""
    if spec == "none":
        return None
    if not spec and not state.tokenizer(path):
        print("the run had no tokenizer, and the export has none; --tokenizer adds one", file=sys.stderr)
        return None
    return tokenizer_for(spec, path, state, vocab_size)


def export_checkpoint(options: Export) -> int:
    from megazero.interop.huggingface.export import export, shapes_of

    path = found_checkpoint(options.folder)
    if not 0 < options.max_shard_size < float("inf"):
        raise ValueError(f"--max-shard-size {options.max_shard_size}: must be a number of GiB above 0, such as 5")
    state = RunState.read(path)
    model = state.model_config(path)
    tokenizer = tokenizer_of(options.tokenizer, state, path, model.vocab_size)
    total = BYTES[options.dtype] * sum(prod(shape) for shape in shapes_of(model).values())
    with progress_bar("exporting", total) as bar:
        shard_bytes = int(options.max_shard_size * 2**30)
        same = export(
            path,
            options.output,
            tokenizer,
            dtype=options.dtype,
            shard_bytes=shard_bytes,
            weights=options.weights,
            advance=lambda n: bar.advance(n, n),
        )
    print(f"wrote {options.output}: {size(total)} of {options.dtype} weights, of {path}")
    if not same and tokenizer is not None:
        print(
            f"WARNING: transformers gives other ids than --tokenizer {tokenizer.spec} for some texts, since it does "
            "not know how that one normalises them",
            file=sys.stderr,
        )
    return 0


def _to_train(folder: Path) -> str:
    return in_own_words(
        f"  python pretrain_gpt.py --preset {folder}/config.toml --load {folder} --data-path PREFIX ..."
    )


def import_checkpoint(options: Import) -> int:
    from megazero.interop.huggingface.configuration import read_config
    from megazero.interop.huggingface.export import shapes_of
    from megazero.interop.huggingface.importing import import_model

    model = read_config(options.folder).model
    total = BYTES["fp32"] * sum(prod(shape) for shape in shapes_of(model).values())
    with progress_bar("importing", total) as bar:
        has_tokenizer = import_model(options.folder, options.output, lambda n: bar.advance(n, n))
    print(f"wrote {options.output}: {size(total)} of fp32 weights, of {options.folder}. To train on from there:")
    print(_to_train(options.output))
    if not has_tokenizer:
        print(f"{options.folder} has no tokenizer; pass --tokenizer to every program that needs one", file=sys.stderr)
    return 0


def upcycle_checkpoint(options: Upcycle) -> int:
    from megazero.interop.upcycle import upcycle, with_experts

    if options.moe_router_pre_softmax:
        raise ValueError(
            "--moe-router-pre-softmax: the weights of a token's experts would not add up to 1, so that the first loss "
            "would not be that of the dense model; drop it"
        )
    path = found_checkpoint(options.load)
    state = RunState.read(path)
    model = with_experts(
        path,
        state.model_config(path),
        num_experts=options.num_experts,
        moe_router_topk=options.moe_router_topk,
        moe_layer_freq=options.moe_layer_freq,
    )
    parameters = sum(prod(spec.shape) for spec in declare(model).params())
    total = BYTES[state.master_precision] * parameters
    with progress_bar("upcycling", total) as bar:
        upcycle(path, options.save, model, seed=options.seed, advance=lambda n: bar.advance(n, n))
    print(f"wrote {options.save}: {parameters:,} parameters, {size(total)}, of {path}. To train on from there:")
    print(_to_train(options.save))
    return 0


def merge_checkpoints(options: Merge) -> int:
    from megazero.interop.merge import merge, merge_weights, same_model

    paths = [found_checkpoint(folder) for folder in options.checkpoints]
    states = [RunState.read(path) for path in paths]
    model = same_model(paths, states)
    weights = merge_weights(options.weights, options.decay_style, paths, states)
    parameters = sum(prod(spec.shape) for spec in declare(model).params())
    total = parameters * sum(BYTES[state.master_precision] for state in states)
    with progress_bar("merging", total) as bar:
        merge(paths, options.output, weights, states, advance=lambda n: bar.advance(n, n))
    printed([("weight", "checkpoint"), *((f"{w:.6g}", str(path)) for w, path in zip(weights, paths, strict=True))])
    print(f"wrote {options.output}: {parameters:,} merged parameters. To evaluate them, or to train on from there:")
    print(_to_train(options.output))
    return 0


COMMANDS: dict[type, Callable[..., int]] = {
    List: list_checkpoints,
    Verify: verify_checkpoints,
    Show: show_checkpoint,
    Export: export_checkpoint,
    Import: import_checkpoint,
    Upcycle: upcycle_checkpoint,
    Merge: merge_checkpoints,
}


def run_checkpoint_tool(argv: list[str]) -> int:
    """Run a command line, and return the exit code."""
    kinds = [with_whole_lines(kind) if {"--help", "-h"} & {*argv} else kind for kind in COMMANDS]
    one_of_them: Any = functools.reduce(operator.or_, kinds)
    try:
        chosen = tyro.cli(
            one_of_them,
            args=argv,
            prog=program_name("scripts/checkpoint.py"),
            description=in_own_words(__doc__),
        )
        return COMMANDS[type(chosen)](chosen)
    except ModuleNotFoundError as error:
        message = f"this {missing_package(error)}"
    except ValueError as error:
        message = f"error: {error}"
    except OSError as error:
        message = f"error: {explain(error)}"
    print(in_own_words(message), file=sys.stderr)
    return 1
