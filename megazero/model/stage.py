"""The layers of one pipeline rank, of any architecture; and what they declare, as plain values."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

import torch
import torch.nn as nn

from megazero.comm.pretend import pretend_mesh
from megazero.config.architectures import ARCHITECTURES
from megazero.config.schema import ModelConfig
from megazero.memory.tracker import MemoryTracker
from megazero.model.block import Architecture
from megazero.model.context import Context, DeviceBatch, MicroBatchInfo, ResidualStream
from megazero.model.vocabulary import VocabularyTable, vocabulary_loss
from megazero.model.weight import Weight, named_weights
from megazero.plan.parameters import HEAD, POSITION_EMBEDDING, TOKEN_EMBEDDING, ParamSpec
from megazero.plan.topology import Layout


def architecture(name: str) -> Architecture:
    return importlib.import_module(ARCHITECTURES[name].module).ARCHITECTURE


class TokenEmbedding(VocabularyTable):
    """The token table; then the embedding's dropout, unless a layer of positions follows, which has it."""

    def __init__(self, model: ModelConfig, made: Architecture, context: Context) -> None:
        super().__init__(model, context)
        probability = model.hidden_dropout if made.positions is None else 0.0
        self.dropout = context.dropout(probability, -1, "embedding")

    def forward(self, ids: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """ids [b, s] -> [T', h]"""
        return self.dropout(self.look_up(ids), tokens.dropout_rows)


class Head(nn.Module):
    """Final norm, then the vocabulary: loss, or logits. The output matrix is its own, or the token table."""

    def __init__(self, model: ModelConfig, norm: nn.Module, tied: VocabularyTable | None, context: Context) -> None:
        super().__init__()
        self.context, self.norm = context, norm
        self.output = VocabularyTable(model, context) if tied is None else None
        self._tied = (tied,)  # in a tuple, so that it is not registered as a child: the table is a unit of its own

    @property
    def table(self) -> VocabularyTable:
        table = self.output or self._tied[0]
        assert table is not None
        return table

    def forward(self, x: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T', h], labels and weights [b, s] -> each sample's sum of weights x cross-entropy, in nats: [b] fp64."""
        return vocabulary_loss(self.norm(x), self.table, labels, weights, self.context)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] -> [.., v/tp], without a gradient."""
        return self.table.logits(self.norm(x))

    def whole_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, h] -> [n, v], the same on all of tp, without a gradient."""
        return self.table.whole_logits(self.norm(x))


class Stage(nn.Module):
    """The layers of one pipeline rank. With one rank it is the whole model.

    Attributes:
        units: unit name -> its weights, in the order of the forward pass. They have no memory yet.
    """

    def __init__(
        self,
        model: ModelConfig,
        blocks: Iterable[int],
        context: Context,
        *,
        first: bool = True,
        last: bool = True,
        frozen: tuple[str, ...] = (),
    ) -> None:
        """Build blocks of these numbers, without memory.

        Args:
            first, last: whether it holds the first, or the last, virtual stage. Both hold a tied token table.
            frozen: patterns of the names of weights that do not train.
        """
        super().__init__()
        assert model.vocab_size > 0, "the vocabulary size is not resolved yet"
        made = architecture(model.architecture)
        self.stream = context.stream
        tied = not model.untie_embeddings
        self.token_embedding = TokenEmbedding(model, made, context) if first or (last and tied) else None
        self.position_embedding = made.positions(model, context) if first and made.positions is not None else None
        self.blocks = nn.ModuleDict()
        for number in blocks:
            self.blocks[str(number)] = made.block(model, number, context)
        table = self.token_embedding if tied else None
        self.head = Head(model, made.norm(model, context), table, context) if last else None
        layers = {TOKEN_EMBEDDING: self.token_embedding, POSITION_EMBEDDING: self.position_embedding}
        layers |= {f"blocks.{number}": block for number, block in self.blocks.items()} | {HEAD: self.head}
        self.units: dict[str, list[Weight]] = {
            name: named_weights(layer, name, frozen) for name, layer in layers.items() if layer is not None
        }

    def compute(self, name: str) -> Callable[[torch.Tensor | None, DeviceBatch, bool], torch.Tensor]:
        """Bind layer `name` to what it reads of a micro-batch: compute(x, batch, output).

        `output` False: only the graph is needed; what is returned is never read.
        """
        layer = self.get_submodule(name)

        def token(x: None, batch: DeviceBatch, output: bool) -> torch.Tensor:
            return layer(batch.ids, batch.tokens)

        def position(x: torch.Tensor, batch: DeviceBatch, output: bool) -> torch.Tensor:
            return layer(x, batch.tokens)

        def block(x: torch.Tensor, batch: DeviceBatch, output: bool) -> torch.Tensor:
            return layer(x, batch.tokens, output)

        def head(x: torch.Tensor, batch: DeviceBatch, output: bool) -> torch.Tensor:
            return layer(x, batch.labels, batch.loss_mask)

        found: dict[str, Callable[..., torch.Tensor]] = {
            TOKEN_EMBEDDING: token,
            POSITION_EMBEDDING: position,
            HEAD: head,
        }
        return found.get(name, block)

    def embed(self, ids: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """ids [b, s] -> [T', h]; on the first pipeline rank."""
        assert self.token_embedding is not None
        x = self.token_embedding(ids, tokens)
        return x if self.position_embedding is None else self.position_embedding(x, tokens)

    def body(self, x: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> [T', h], through this rank's blocks."""
        for block in self.blocks.values():
            x = block(x, tokens)
        return x


def declare(model: ModelConfig, tp: int) -> dict[str, tuple[ParamSpec, ...]]:
    """Unit name -> the weights that its layer declares on `tp` tensor-parallel ranks; of the blocks, the first."""
    mesh = pretend_mesh(Layout(tp=tp), 0, torch.device("meta"), needs_staging_buffer=False)
    context = Context(ResidualStream(mesh.tp, sharded=False), MemoryTracker(), "fp32", mesh.device)
    units = Stage(model, [0], context).units
    return {name: tuple(weight.spec for weight in weights) for name, weights in units.items()}
