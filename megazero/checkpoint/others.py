"""Checkpoints of other systems: recognised by the names of their files, refused, and never written into."""

from collections.abc import Iterator
from itertools import combinations, islice
from pathlib import Path
from typing import NamedTuple

from megazero.checkpoint.manifest import MANIFEST

MOST_ENTRIES, MOST_FOLDERS, DEPTH = 4096, 64, 4  # looked at: in all, below each folder, and levels


class Format(NamedTuple):
    """A format.

    Attributes:
        name: of its checkpoints.
        marks: patterns of paths below the folder that --load or --save names, one of which is enough; `a + b` are two
            paths in one folder.
        way_out: how their weights become a Hugging Face folder.
    """

    name: str
    marks: tuple[str, ...]
    way_out: str


BY_DEEPSPEED = "DeepSpeed's zero_to_fp32.py and the model's save_pretrained write a Hugging Face folder"
BY_BRIDGE = "export_ckpt of Megatron-Bridge writes a Hugging Face folder"
BY_LIBRARY = "write a Hugging Face folder with the model's save_pretrained"

HUGGING_FACE = Format(
    "a Hugging Face model", ("config.json + *.safetensors", "config.json + pytorch_model*.bin"), "--load it alone"
)

# The first that fits counts: files of a later kind may be next to those of an earlier one.
KINDS = (
    Format(
        "a universal checkpoint of DeepSpeed", ("latest_universal", "zero/*/fp32.pt", "*/zero/*/fp32.pt"), BY_DEEPSPEED
    ),
    Format(
        "a checkpoint of transformers' Trainer",
        ("trainer_state.json", "checkpoint-*/trainer_state.json", "checkpoint-*/optimizer.*"),
        "the folder in it that has config.json and the weights is a Hugging Face folder",
    ),
    Format(
        "a checkpoint of DeepSpeed",
        (
            *(f"{where}*{end}_states.pt" for where in ("", "*/") for end in ("model", "optim")),
            *("zero_to_fp32.py", "*/zero_to_fp32.py", "global_step*"),
        ),
        BY_DEEPSPEED,
    ),
    Format(
        "a checkpoint of Megatron-LM (torch_dist)",
        tuple(
            f"{where}{one} + {where}{other}"
            for where in ("", "*/")
            for one, other in combinations(("common.pt", ".metadata", "metadata.json"), 2)
        ),
        BY_BRIDGE,
    ),
    Format(
        "a checkpoint of Megatron-LM",
        ("mp_rank_*/*.pt", "*/mp_rank_*/*.pt", "latest_checkpointed_iteration.txt"),
        BY_BRIDGE,
    ),
    Format(
        "a distributed checkpoint of PyTorch (DCP)",
        (".metadata", "*/.metadata", "*.distcp", "*/*.distcp"),
        "the system that wrote it has a converter to Hugging Face (torchtitan: convert_to_hf.py)",
    ),
    Format("a checkpoint of Accelerate", ("random_states_*.pkl", "*/random_states_*.pkl"), BY_LIBRARY),
    HUGGING_FACE,
    Format("a checkpoint of NeMo", ("*.nemo",), "NeMo's export_ckpt writes a Hugging Face folder"),
    Format(
        "a checkpoint of PyTorch Lightning",
        ("*.ckpt", "checkpoints/*.ckpt", "version_*/checkpoints/*.ckpt"),
        BY_LIBRARY,
    ),
    Format(
        "a checkpoint of Orbax",
        ("_CHECKPOINT_METADATA", "*/_CHECKPOINT_METADATA"),
        "the system that wrote it has a converter to Hugging Face",
    ),
    Format(
        "a file of torch.save",
        (
            *(f"{name}*{end}" for name in ("ckpt", "checkpoint", "model", "consolidated") for end in (".pt", ".pth")),
            *("pytorch_model*.bin", "*.bin + *.index.json"),
        ),
        BY_LIBRARY,
    ),
)
# Other names are of tensors of any purpose: a folder may have them, and a file that is named itself is one.
ANY_FILE = Format("a file of torch.save", ("*.pt", "*.pth"), BY_LIBRARY)


class Other(NamedTuple):
    """A checkpoint of another system, and the path in the folder by which it was recognised."""

    kind: Format
    path: Path


def other_system(path: Path) -> Other | None:
    """Return the other system's checkpoint in the folder, or the file, `path`; None if none is recognised."""
    is_file = path.is_file()
    found = [Path(path.name)] if is_file else list(islice(_paths(path), MOST_ENTRIES))
    for kind in (*KINDS, ANY_FILE) if is_file else KINDS:
        for mark in kind.marks:
            matches = [[each for each in found if _fits(each, part)] for part in mark.split(" + ")]
            for first in matches[0]:
                if all(any(each.parent == first.parent for each in others) for others in matches[1:]):
                    return Other(kind, first)
    return None


def _fits(path: Path, pattern: str) -> bool:
    return len(path.parts) == pattern.count("/") + 1 and path.match(pattern)


def _paths(root: Path) -> Iterator[Path]:
    """Yield paths below a folder, relative to it, level by level; not those in our own checkpoints."""
    level = [Path()]
    for _ in range(DEPTH):
        below = list[Path]()
        for folder in level:
            try:
                entries = sorted((root / folder).iterdir())[:MOST_ENTRIES]
            except OSError:
                continue
            yield from (folder / entry.name for entry in entries)
            inner = (each for each in entries if each.is_dir() and not (each / MANIFEST).exists())
            below += [folder / each.name for each in islice(inner, MOST_FOLDERS)]
        level = below


def refuse_other(flag: str, path: Path) -> None:
    """Refuse to load another system's checkpoint. ValueError names it, and the way to its weights.

    A Hugging Face folder is not refused.
    """
    other = other_system(path)
    if other is not None and other.kind is not HUGGING_FACE:
        raise ValueError(
            f"{flag} {path} has {other.kind.name} ({other.path}), which this version does not load; "
            f"{other.kind.way_out}, and --load of that folder begins from its weights"
        )
