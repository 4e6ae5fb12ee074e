"""The layers of one pipeline rank, of any architecture; and their declarations as plain values.

Shapes: b micro-batch, s sequence, T' tokens of the residual stream on this rank, h hidden, v vocabulary; /tp = this
rank's part.
"""

import functools
from collections.abc import Hashable, Iterable

import torch
import torch.nn as nn

from megazero.engine.kernels.eager import LogitMap
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.collectives import Axis
from megazero.engine.model.block import BLOCK_CLASSES, Layer
from megazero.engine.model.layers.context import Context, DeviceBatch, MicroBatchInfo, ResidualStream
from megazero.engine.model.layers.norm import NORMS, Norm
from megazero.engine.model.layers.vocabulary import Output, VocabularyTable
from megazero.engine.model.layers.weight import GradWriter, Weight, named_weights
from megazero.engine.model.prediction import Depths, Prediction
from megazero.engine.options.model_options import ModelOptions
from megazero.engine.plan.layout.layers import End, LayerKind, Layers, Use
from megazero.engine.plan.layout.parameters import EXPERTS, unit_of

TOKEN_EMBEDDING, POSITION_EMBEDDING, BLOCKS, HEAD = "token_embedding", "position_embedding", "blocks.", "head"


class TokenEmbedding(VocabularyTable, Layer):
    """The token table, then the embedding's dropout. If a layer of positions follows, that layer has the dropout."""

    use, end = Use.LOOKUP, End.FIRST

    def __init__(self, model: ModelOptions, context: Context) -> None:
        super().__init__(model, context)
        probability = 0.0 if model.learned_positions else model.hidden_dropout
        self.dropout = context.dropout(probability, -1, "embedding")

    def forward(self, ids: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """ids [b, s] -> [T', h]"""
        return self.dropout(self.look_up(ids), tokens.dropout_rows)

    def compute(self, x: torch.Tensor | None, batch: DeviceBatch, output: bool) -> torch.Tensor:
        return self(batch.ids, batch.tokens)


class _AddPositions(torch.autograd.Function):
    """`runs`: the positions of the tokens of x."""

    @staticmethod
    def forward(ctx, x, weight, runs, handle):
        ctx.weight, ctx.runs = weight, runs
        y = torch.empty_like(x)
        for part, into, run in zip(*(_split(t, runs) for t in (x, y)), runs, strict=True):
            torch.add(part, weight.data[run.start : run.stop], out=into)
        return y

    @staticmethod
    def backward(ctx, dy):
        def write(dy: torch.Tensor, out: torch.Tensor, add: bool) -> None:
            if not add:
                out.zero_()
            for part, run in zip(_split(dy, ctx.runs), ctx.runs, strict=True):
                out[run.start : run.stop].add_(part)

        ctx.weight.accumulate_grad(GradWriter(write, (dy,)))
        return dy, None, None, None


def _split(x: torch.Tensor, runs: tuple[range, ...]) -> tuple[torch.Tensor, ...]:
    return x.split([len(run) for run in runs])


class PositionEmbedding(Layer):
    """Adds learned positions, then applies the embedding's dropout."""

    use, end = Use.LOOKUP, End.FIRST

    def __init__(self, model: ModelOptions, context: Context) -> None:
        super().__init__()
        self.weight = context.weight(model.seq_length, model.hidden_size, std=model.init_method_std, decays=True)
        self.dropout = context.dropout(model.hidden_dropout, -1, "embedding")

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> [T', h]"""
        return self.dropout(_AddPositions.apply(x, self.weight, tokens.runs, self.weight.handle), tokens.dropout_rows)

    def compute(self, x: torch.Tensor | None, batch: DeviceBatch, output: bool) -> torch.Tensor:
        return self(x, batch.tokens)


class Head(Layer):
    """Final norm, then loss or logits. The output matrix is its own or, if tied, the token table.

    Modules of multi-token prediction are parts of it, and read the token table: `engine.model.prediction`.
    """

    use, end = Use.HEAD, End.LAST

    def __init__(self, model: ModelOptions, norm: Norm, tokens: VocabularyTable | None, context: Context) -> None:
        """tokens: the token table, if the head reads it."""
        super().__init__()
        self.norm = norm
        self.output = VocabularyTable(model, context) if model.untie_embeddings else None
        self.reads = () if tokens is None else (TOKEN_EMBEDDING,)
        has_bias = "logits" in model.linear_biases
        self.output_bias = context.weight(model.vocab_size, sharded={0: "tp"}, pads=True) if has_bias else None
        to_logits = LogitMap(1 / model.logits_divisor, model.final_softcap)
        table = self.output or tokens
        assert table is not None
        # tuples, so that nn.Module does not register the token table: it is a unit of its own
        self.vocabulary = Output(table, self.output_bias, to_logits)
        numbers = range(model.num_layers, model.num_layers + model.mtp_num_layers)
        self.mtp = nn.ModuleList(Prediction(model, number, context) for number in numbers)
        self.depths = Depths(norm, self.vocabulary, tokens, tuple(self.mtp)) if tokens and self.mtp else None

    def compute(self, x: torch.Tensor | None, batch: DeviceBatch, output: bool) -> torch.Tensor:
        """x [T', h] -> per sample the sum of weights x cross-entropy in nats, [b] fp64; in training of each depth."""
        assert x is not None
        if self.depths is not None and batch.ahead:
            return self.depths.losses(x, batch)
        return self.vocabulary.loss(x, self.norm, batch.labels, batch.loss_mask, batch.seed)

    def whole_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, h] -> [n, v], the same on all of tp, without a gradient."""
        return self.vocabulary.whole_logits(self.norm(x))


class Stage(nn.Module):
    """The layers of one pipeline rank. With one rank it is the whole model.

    Attributes:
        units: unit name -> its weights, in the order of the forward pass. They have no memory yet.
    """

    def __init__(
        self, model: ModelOptions, names: Iterable[str], context: Context, frozen: tuple[str, ...] = ()
    ) -> None:
        """Build layers without memory.

        Args:
            names: of the layers, in the order of the forward pass. A head that reads the token table adds it.
            frozen: patterns of the names of weights that do not train.
        """
        super().__init__()
        assert model.vocab_size > 0, "the vocabulary size is not resolved yet"
        names = list(names)
        self.stream = context.stream
        reads = HEAD in names and (not model.untie_embeddings or model.mtp_num_layers > 0)
        self.token_embedding = TokenEmbedding(model, context) if reads or TOKEN_EMBEDDING in names else None
        self.position_embedding = PositionEmbedding(model, context) if POSITION_EMBEDDING in names else None
        self.blocks = nn.ModuleDict()
        for number in (name.removeprefix(BLOCKS) for name in names if name.startswith(BLOCKS)):
            self.blocks[number] = BLOCK_CLASSES[model.parallel_norms](model, int(number), context)
        table = self.token_embedding if reads else None
        self.head = Head(model, NORMS[model.norm](model, context), table, context) if HEAD in names else None
        self.layers = tuple(dict.fromkeys([TOKEN_EMBEDDING] if reads else []) | dict.fromkeys(names))
        self.units: dict[str, list[Weight]] = {}
        for name in self.layers:
            self.units[name] = []
            for weight in named_weights(self.layer(name), name, frozen):
                self.units.setdefault(unit_of(name, weight.spec), []).append(weight)

    def layer(self, name: str) -> Layer:
        return self.get_submodule(name)


def block_numbers(names: Iterable[str]) -> frozenset[int]:
    """Return the numbers of the blocks of these names."""
    return frozenset(int(name.removeprefix(BLOCKS)) for name in names)


@functools.lru_cache(maxsize=64)
def declare(model: ModelOptions, tp: int = 1) -> Layers:
    """Return the declarations of a model's layers on `tp` tensor-parallel ranks. Each kind of layer is built once."""
    stream = ResidualStream(Axis("tp", list(range(tp)), rank=0), sharded=False)
    context = Context(stream, MemoryTracker(), "fp32", torch.device("meta"))
    first: dict[Hashable, str] = {}
    kind_of = {TOKEN_EMBEDDING: TOKEN_EMBEDDING}
    if model.learned_positions:
        kind_of[POSITION_EMBEDDING] = POSITION_EMBEDDING
    for number in range(model.num_layers):
        name = f"{BLOCKS}{number}"
        kind_of[name] = first.setdefault(BLOCK_CLASSES[model.parallel_norms].kind(model, number), name)
    kind_of[HEAD] = HEAD
    stage = Stage(model, dict.fromkeys(kind_of.values()), context)
    kinds = {name: _declared(name, stage) for name in stage.layers}
    return Layers(tp, {name: kinds[kind] for name, kind in kind_of.items()})


def _declared(name: str, stage: Stage) -> LayerKind:
    layer, units = stage.layer(name), (stage.units[name], stage.units.get(name + EXPERTS, []))
    params = tuple(weight.spec for unit in units for weight in unit)
    score_flops = sum(getattr(part, "score_flops", 0) for part in layer.modules())
    return LayerKind(name=name, use=layer.use, end=layer.end, params=params, reads=layer.reads, score_flops=score_flops)
