"""A whole pretraining run in plain PyTorch, from the rules in docs/run.md alone: the expected `metrics.jsonl`.

Nothing here imports megazero. Token files, order of samples, initial weights and dropout masks are made from their
documented formulas; the rest is torch.optim.AdamW, torch.amp.GradScaler, clip_grad_norm_ and transformers' schedules,
over whole tensors in fp64. A 16-bit run is the same arithmetic with every activation, and every gradient of one,
rounded to 16 bit.

Flags are those of the command line, without dashes: {"num-layers": 2, ...}. Every flag that matters must be given.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open

Flags = dict[str, Any]
Weights = dict[str, torch.Tensor]
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def blake(*coordinates: object) -> int:
    """The 63-bit seed of some coordinates."""
    digest = hashlib.blake2b("/".join(map(str, coordinates)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# -- data


class Corpus:
    """The documents of PREFIX.bin and PREFIX.idx, as lists of token ids."""

    def __init__(self, prefix: str) -> None:
        index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
        magic, version, code, sequences, indices = struct.unpack_from("<9sQBQQ", index)
        assert magic == b"MMIDIDX\0\0" and version == 1
        at = struct.calcsize("<9sQBQQ")
        lengths = struct.unpack_from(f"<{sequences}i", index, at)
        offsets = struct.unpack_from(f"<{sequences}q", index, at + 4 * sequences)
        bounds = struct.unpack_from(f"<{indices}q", index, at + 12 * sequences)
        parts = [np.frombuffer(tokens, TOKEN_TYPES[code], n, o).tolist() for n, o in zip(lengths, offsets, strict=True)]
        self.documents = [list(chain(*parts[bounds[d] : bounds[d + 1]])) for d in range(indices - 1)]
        num_tokens, name = sum(lengths), np.dtype(TOKEN_TYPES[code]).name
        digest = hashlib.sha256(repr((len(index), num_tokens, name)).encode())
        ends = 16 << 20
        digest.update(index[:ends] + index[max(0, len(index) - ends) :])
        self.fingerprint = digest.hexdigest()


def write_corpus(prefix: Path, code: str, documents: list[list[list[int]]]) -> None:
    """The files of a corpus without PREFIX.json. `documents`: their sequences of token ids; `code`: of TOKEN_TYPES."""
    sequences = list(chain(*documents))
    lengths = [len(sequence) for sequence in sequences]
    bounds = [0, *accumulate(len(document) for document in documents)]
    data = np.array(list(chain(*sequences)), code)
    offsets = [start * data.itemsize for start in accumulate(lengths, initial=0)][:-1]
    number = {name: number for number, name in TOKEN_TYPES.items()}[code]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, number, len(lengths), len(bounds))
    index = [struct.pack(f"<{len(lengths)}i", *lengths), *(struct.pack(f"<{len(r)}q", *r) for r in (offsets, bounds))]
    Path(f"{prefix}.bin").write_bytes(data.tobytes())
    Path(f"{prefix}.idx").write_bytes(header + b"".join(index))


def split_of(corpus: Corpus, split: str, which: int) -> range:
    """The documents of training (0), validation (1) or test (2)."""
    shares = [float(part) for part in split.split(",")]
    borders = [round(sum(shares[:k]) / sum(shares) * len(corpus.documents)) for k in range(4)]
    return range(borders[which], borders[which + 1])


class Stream:
    """The endless samples of one split of one corpus."""

    def __init__(self, corpus: Corpus, flags: Flags, which: int) -> None:
        self.corpus, self.length, self.seed = corpus, flags["seq-length"], flags["seed"]
        self.documents = split_of(corpus, flags["split"], which)
        self.num_tokens = sum(len(corpus.documents[d]) for d in self.documents)

    def _permutation(self, purpose: str, sizes: tuple[int, ...], epoch: int, count: int) -> list[int]:
        split = (self.corpus.fingerprint, self.documents.start, self.documents.stop)
        key = hashlib.sha256(repr((purpose, split, sizes, self.seed, epoch)).encode()).digest()
        raw = np.random.PCG64(int.from_bytes(key, "little")).random_raw(count).tolist()
        return sorted(range(count), key=raw.__getitem__)

    @cache  # noqa: B019
    def _epoch(self, epoch: int) -> list[int]:
        """Tokens of an epoch: all documents, shuffled."""
        order = self._permutation("documents", (), epoch, len(self.documents))
        return list(chain(*(self.corpus.documents[self.documents[d]] for d in order)))

    def sample(self, number: int) -> list[int]:
        """s + 1 tokens."""
        epoch = number * self.length // self.num_tokens
        first, stop = (-(-e * self.num_tokens // self.length) for e in (epoch, epoch + 1))
        chosen = first + self._permutation("samples", (self.length,), epoch, stop - first)[number - first]
        at = chosen * self.length
        tokens = [t for e in range(at // self.num_tokens, epoch + 3) for t in self._epoch(e)]
        at -= at // self.num_tokens * self.num_tokens
        return tokens[at : at + self.length + 1]


class PackedSample(list[int]):
    """s + 1 tokens, -1 for padding. ends: places of the last tokens of documents, and of pieces."""

    ends: set[int]


class PackedStream(Stream):
    """The endless samples of one split of one corpus, with --packing best-fit."""

    def __init__(self, corpus: Corpus, flags: Flags, which: int) -> None:
        super().__init__(corpus, flags, which)
        s, documents = self.length, [corpus.documents[d] for d in self.documents]
        self.samples = [[d[at : at + s + 1]] for d in documents for at in range(0, len(d) - s, s)]
        order = self._permutation("packing", (s,), 0, len(documents))
        rests = [d if len(d) <= s else d[(len(d) - 1) // s * s :] for d in (documents[i] for i in order)]
        bins: list[list[list[int]]] = []
        last: list[int] = []  # bin -> number of its last document
        for number, document in enumerate(sorted((d for d in rests if len(d) > 1), key=len, reverse=True)):
            spaces = [s + 1 - sum(map(len, each)) for each in bins]
            enough = [i for i, space in enumerate(spaces) if space >= len(document)]
            chosen = min(enough, key=lambda i: (spaces[i], last[i]), default=len(bins))
            if chosen == len(bins):
                bins.append([])
                last.append(0)
            bins[chosen].append(document)
            last[chosen] = number
        self.samples += bins

    def sample(self, number: int) -> list[int]:
        epoch, place = divmod(number, len(self.samples))
        parts = self.samples[self._permutation("packed samples", (self.length,), epoch, len(self.samples))[place]]
        found = PackedSample(chain(*parts))
        found.ends = {end - 1 for end in accumulate(map(len, parts))}
        found.extend([-1] * (self.length + 1 - len(found)))
        return found


class Blend:
    """Samples of several streams, by weight: each is the next one of the stream that is furthest behind its share."""

    def __init__(self, streams: list[Stream], weights: list[Fraction]) -> None:
        assert len(streams) <= 2, "of three and more, docs/run.md pairs them in a tree"
        self.streams, self.shares = streams, [w / sum(weights) for w in weights]

    def sample(self, number: int) -> list[int]:
        chosen, place = self.find(number)
        return self.streams[chosen].sample(place)

    def find(self, number: int) -> tuple[int, int]:
        """(number of the stream, number in it) of a sample."""
        counts = [0] * len(self.streams)
        for n in range(number + 1):
            behind = [share * max(n, 1) - count for share, count in zip(self.shares, counts, strict=True)]
            chosen = behind.index(max(behind))  # of equals, the first
            counts[chosen] += 1
        return chosen, counts[chosen] - 1


def open_blend(flags: Flags, which: int) -> Blend:
    words = [str(word) for word in flags["data-path"]]
    weights, prefixes = (["1"], words) if len(words) == 1 else (words[::2], words[1::2])
    kind = PackedStream if "packing" in flags else Stream
    streams = [kind(Corpus(prefix), flags, which) for prefix in prefixes]
    return Blend(streams, [Fraction(weight) for weight in weights])


# -- the model


def initial_weights(flags: Flags) -> Weights:
    """Every parameter by its name, fp32."""
    layers, h, heads = flags["num-layers"], flags["hidden-size"], flags["num-attention-heads"]
    std, f = flags["init-method-std"], 4 * h
    small = std / math.sqrt(2 * layers)
    normal = {"token_embedding.weight": (std, (flags["vocab-size"], h))}
    normal["position_embedding.weight"] = (std, (flags["seq-length"], h))
    constant = {"head.norm.weight": (1.0, (h,)), "head.norm.bias": (0.0, (h,))}
    for i in range(layers):
        block = f"blocks.{i}"
        normal[f"{block}.attention.qkv.weight"] = (std, (heads, 3, h // heads, h))
        normal[f"{block}.attention.proj.weight"] = (small, (h, h))
        normal[f"{block}.mlp.up.weight"] = (std, (f, h))
        normal[f"{block}.mlp.down.weight"] = (small, (h, f))
        constant |= {
            f"{block}.norm{k}.{what}": (v, (h,)) for k in (1, 2) for what, v in (("weight", 1.0), ("bias", 0.0))
        }
        constant[f"{block}.attention.qkv.bias"] = (0.0, (heads, 3, h // heads))
        constant[f"{block}.mlp.up.bias"] = (0.0, (f,))
        constant |= {f"{block}.{name}.bias": (0.0, (h,)) for name in ("attention.proj", "mlp.down")}
    return drawn(flags, normal, constant)


def drawn(flags: Flags, normal: dict[str, Any], constant: dict[str, Any]) -> Weights:
    """Draw weights of (standard deviation, shape), and fill those of (value, shape)."""
    weights = {name: torch.full(shape, value) for name, (value, shape) in constant.items()}
    for name, (deviation, shape) in normal.items():
        blocks = -(-math.prod(shape) // 65536)
        seeds = [blake(flags["seed"], name, block) for block in range(blocks)]
        numbers = torch.cat([torch.empty(65536).normal_(generator=torch.Generator().manual_seed(s)) for s in seeds])
        weights[name] = numbers[: math.prod(shape)].view(shape) * deviation
    return weights


def mix(x: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x7FEB352D)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    return x


def dropout_mask(flags: Flags, p: float, samples: list[int], layer: int, site: str, rows: int, columns: int) -> Any:
    """[b, rows, columns]: 0, or 1 / (1 - p) in fp32."""
    masks = []
    for sample in samples:
        key, row = blake(flags["seed"], "dropout", sample, layer, site), np.arange(rows, dtype=np.uint32)[:, None]
        a, b = mix(row ^ np.uint32(key & 0xFFFFFFFF)), mix(row ^ np.uint32(key >> 32))
        x = a + np.arange(columns, dtype=np.uint32) * np.uint32(0x9E3779B1)
        x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D) ^ b
        x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
        kept = (x ^ np.uint32(1 << 31)) < round((1 - p) * 2**32)  # compared as signed numbers
        masks.append(kept * float(np.float32(1 / (1 - p))))
    return torch.from_numpy(np.stack(masks))


class Round(torch.autograd.Function):
    """x rounded to a 16-bit type, and so is its gradient; `largest` collects the gradients' magnitudes."""

    @staticmethod
    def forward(ctx, x, dtype, largest):
        ctx.dtype, ctx.largest = dtype, largest
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        ctx.largest.append(float(dy.abs().max()))
        return dy.to(ctx.dtype).to(dy.dtype), None, None


class Model:
    """GPT-2's architecture over named fp64 weights, which may have been rounded to 16 bit."""

    def __init__(self, flags: Flags, weights: Weights) -> None:
        self.flags, self.weights = flags, weights
        self.half = HALVES.get(flags["precision"])
        self.ends = torch.empty(0)  # of documents, [b, s]
        self.largest: list[float] = []  # of the gradients of activations, before they are rounded

    def __call__(self, ids: torch.Tensor, samples: list[int] | None) -> torch.Tensor:
        """Logits [b, s, v] of ids [b, s]. `samples`: their numbers, for dropout; None in evaluation."""
        flags, (b, s), r = self.flags, ids.shape, self.round
        w = {name: self.rounded(name, t) for name, t in self.weights.items()}
        h, heads = flags["hidden-size"], flags["num-attention-heads"]

        def drop(x: torch.Tensor, p: float, layer: int, site: str) -> torch.Tensor:
            """x [b, .., columns]"""
            if samples is None or p == 0:
                return x
            rows = x[0].numel() // x.shape[-1]
            return r(x * dropout_mask(flags, p, samples, layer, site, rows, x.shape[-1]).view(x.shape))

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return r(F.layer_norm(x, (h,), w[f"{name}.weight"], w[f"{name}.bias"]))

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return r(F.linear(x, w[f"{name}.weight"].reshape(-1, x.shape[-1]), w[f"{name}.bias"].flatten()))

        residual, hidden = flags["hidden-dropout"], torch.ones(b, s, s, dtype=torch.bool).triu(1)
        positions = torch.arange(s).repeat(b, 1)
        packed = "packing" in flags
        for row, place in self.ends.nonzero().tolist():  # as Megatron has it
            if flags["reset-attention-mask"] or packed:
                hidden[row, place + 1 :, : place + 1] = True
            if flags["reset-position-ids"] or packed:
                positions[row, place + 1 :] = torch.arange(s - place - 1)
        x = r(r(F.embedding(ids, w["token_embedding.weight"])) + w["position_embedding.weight"][positions])
        x = drop(x, residual, -1, "embedding")
        for i in range(flags["num-layers"]):
            at = f"blocks.{i}"
            qkv = linear(norm(x, f"{at}.norm1"), f"{at}.attention.qkv").view(b, s, heads, 3, h // heads)
            q, k, v = qkv.transpose(1, 2).unbind(3)
            scores = r(r(q * (h // heads) ** -0.5) @ k.transpose(-1, -2)).masked_fill(hidden[:, None], -math.inf)
            attended = r(drop(r(scores.softmax(-1)), flags["attention-dropout"], i, "scores") @ v)
            y = linear(attended.transpose(1, 2).reshape(b, s, h), f"{at}.attention.proj")
            x = r(x + drop(y, residual, i, "attention"))
            y = linear(norm(x, f"{at}.norm2"), f"{at}.mlp.up")
            y = linear(r(F.gelu(y, approximate="tanh")), f"{at}.mlp.down")
            x = r(x + drop(y, residual, i, "mlp"))
        return r(F.linear(norm(x, "head.norm"), w["token_embedding.weight"]))

    def rounded(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Round as computed. Gradients of matrices and of linear biases are sums in fp32, those of norms in 16 bit."""
        if self.half and "norm" in name:
            return self.round(weight)
        return weight + (weight.to(self.half).to(weight.dtype) - weight).detach() if self.half else weight

    def round(self, x: torch.Tensor) -> torch.Tensor:
        return Round.apply(x, self.half, self.largest) if self.half else x

    def loss(self, samples: list[list[int]], numbers: list[int] | None) -> tuple[torch.Tensor, int]:
        """Return the sum of the cross-entropies of samples of s + 1 tokens, and the number of targets."""
        tokens = torch.tensor(samples)
        counts, tokens = tokens[:, 1:] >= 0, tokens.clamp(min=0)
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        self.ends = eods = ids == self.flags["eod"]
        if "packing" in self.flags:
            self.ends = torch.tensor([[at in sample.ends for at in range(ids.shape[1])] for sample in samples])
            counts &= ~self.ends
        if self.flags["eod-mask-loss"]:
            counts &= ~eods
        each = F.cross_entropy(self(ids, numbers).flatten(0, 1), labels.flatten(), reduction="none")
        return each[counts.flatten()].sum(), int(counts.sum())

    def penalty(self) -> torch.Tensor | float:
        """Return the part of the objective besides the loss of the last call, as a sum over targets."""
        return 0.0

    def read_balance(self) -> dict[str, Any]:
        """Return the metrics of all calls since the last time, and forget these."""
        return {}


# -- the run


def schedule(flags: Flags, optimizer: torch.optim.Optimizer) -> Any:
    """transformers' scheduler; at step i it has the rate of iteration i."""
    import transformers.optimization as t

    warmup, end = flags["lr-warmup-iters"], flags["lr-decay-iters"]
    match flags["lr-decay-style"]:
        case "constant":
            return t.get_constant_schedule_with_warmup(optimizer, warmup)
        case "linear":
            return t.get_polynomial_decay_schedule_with_warmup(optimizer, warmup, end, flags["min-lr"], power=1.0)
        case "cosine":
            return t.get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, end, min_lr=flags["min-lr"])
        case "wsd":
            decay, least = flags["lr-wsd-decay-iters"], flags["min-lr"] / flags["lr"]
            shape = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "1-sqrt"}[flags["lr-wsd-decay-style"]]
            return t.get_wsd_schedule(
                optimizer, warmup, decay, num_stable_steps=end - warmup - decay, decay_type=shape, min_lr_ratio=least
            )


class Run:
    """The run that `flags` ask for, an iteration at a time.

    Attributes:
        margin: the least factor by which the largest 16-bit gradient stayed away from the largest finite number, on
            either side. Near 1, rounding may decide whether an iteration is skipped.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags, self.metrics, self.margin, self.consumed = flags, [], math.inf, 0
        self.train, self.validation = (open_blend(flags, which) for which in (0, 1))
        self.weights = {name: t.double().requires_grad_() for name, t in self._initial_weights().items()}
        self.model = self._model()
        decayed = {n: n.endswith("weight") and "norm" not in n for n in self.weights}
        groups = [
            {"params": [t for n, t in self.weights.items() if decayed[n] == on], "weight_decay": decay}
            for on, decay in ((True, flags["weight-decay"]), (False, 0.0))
        ]
        betas = flags["adam-beta1"], flags["adam-beta2"]
        self.optimizer = torch.optim.AdamW(groups, lr=flags["lr"], betas=betas, eps=flags["adam-eps"])
        self.schedule = schedule(flags, self.optimizer)
        scaled = flags["precision"] == "fp16"
        # Grows and skips by itself; an overflow lowers the scale by Megatron's hysteresis, below.
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=flags["initial-loss-scale"] if scaled else 1.0,
            growth_interval=flags["loss-scale-window"],
            enabled=scaled,
        )
        self.forgiven = flags["hysteresis"]  # overflows until the scale halves

    def _initial_weights(self) -> Weights:
        return initial_weights(self.flags)

    def _model(self) -> Model:
        return Model(self.flags, self.weights)

    def step(self) -> dict[str, Any]:
        """Return the next iteration's object in metrics.jsonl, without values that depend on clock or layout."""
        flags, iteration, batch = self.flags, len(self.metrics) + 1, self._batch_size()
        last = flags["lr-decay-iters"] if flags["lr-decay-style"] == "cosine" else iteration
        for group in self.optimizer.param_groups:
            factor = self.schedule.lr_lambdas[0](min(iteration, last))  # cosine would rise again
            group["lr"] = flags["lr"] * factor
        numbers = [self.consumed + j for j in range(batch)]
        self.consumed += batch
        scale = self.scaler.get_scale()
        by_corpus = self._losses_by_corpus(self.train, numbers, training=True)
        self.optimizer.zero_grad()
        size = flags["micro-batch-size"]
        parts = [numbers[at : at + size] for at in range(0, batch, size)]
        self.model.read_balance()
        losses, counts, penalties = zip(
            *((*self.model.loss([self.train.sample(n) for n in part], part), self.model.penalty()) for part in parts),
            strict=True,
        )
        more = len(parts) if self.scaler.is_enabled() else 1  # the divisor of a micro-batch is a mean one
        for loss, penalty in zip(losses, penalties, strict=True):
            self.scaler.scale((loss + penalty) * more / sum(counts)).backward()
        self.scaler.unscale_(self.optimizer)
        for weight in self.weights.values():
            weight.grad /= more
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.values(), flags["clip-grad"] or math.inf))
        skipped = not math.isfinite(norm)
        self.scaler.step(self.optimizer)
        self._next_scale(skipped)
        record = {
            "iteration": iteration,
            "consumed_samples": self.consumed,
            "loss": sum(float(loss.detach()) for loss in losses) / sum(counts),
            "grad_norm": None if skipped else norm,
            "lr": self.optimizer.param_groups[0]["lr"],
            "loss_scale": scale,
            "skipped": skipped,
            "flops": self._flops(batch),
            "loss_by_corpus": by_corpus,
            **self.model.read_balance(),
        }
        if flags["eval-interval"] and iteration % flags["eval-interval"] == 0:
            validation = range(flags["eval-iters"] * flags["global-batch-size"])
            record["validation_loss"] = self._evaluate(validation)
            record["validation_loss_by_corpus"] = self._losses_by_corpus(self.validation, validation, training=False)
        self.metrics.append(record)
        return record

    def _next_scale(self, overflow: bool) -> None:
        if not self.scaler.is_enabled():
            return
        largest = max(filter(math.isfinite, self.model.largest)) / torch.finfo(self.model.half).max
        self.margin = min(self.margin, largest if overflow else 1 / largest)
        self.model.largest.clear()
        before = self.scaler.get_scale()
        self.scaler.update()
        if overflow:
            assert self.scaler.get_scale() == before / 2
            self.forgiven = max(0, self.forgiven - 1)
            if self.forgiven:
                self.scaler._scale.fill_(before)  # update(new_scale) would not reset the count
        elif self.scaler.get_scale() > before:
            self.forgiven = self.flags["hysteresis"]

    @torch.no_grad()
    def _losses_by_corpus(self, blend: Blend, numbers: Iterable[int], training: bool) -> dict[str, float]:
        """Nats per target, sample by sample, by the prefix of the corpus."""
        sums = dict[str, tuple[float, int]]()
        for n in numbers:
            loss, targets = self.model.loss([blend.sample(n)], [n] if training else None)
            prefix = str(self.flags["data-path"][2 * blend.find(n)[0] + 1])
            total, count = sums.get(prefix, (0.0, 0))
            sums[prefix] = total + float(loss), count + targets
        return {prefix: total / count for prefix, (total, count) in sums.items()}

    @torch.no_grad()
    def _evaluate(self, numbers: Iterable[int]) -> float:
        """Over the first samples of the validation split, always the same ones."""
        total, targets = self.model.loss([self.validation.sample(n) for n in numbers], None)
        return float(total) / targets

    def _batch_size(self) -> int:
        """Return the global batch as Megatron-LM describes it: START, then INCREMENT more in equal stretches."""
        full = int(self.flags["global-batch-size"])
        start, increment, samples = map(int, self.flags.get("rampup-batch-size", (full, 1, 0)))
        if self.consumed > samples or start == full:
            return full
        stretch = Fraction(samples, (full - start) // increment)
        return start + int(self.consumed / stretch) * increment

    def _flops(self, b: int) -> float:
        """Count the FLOPs of an iteration: Narayanan et al. (2021), without recompute."""
        flags = self.flags
        s, h, layers, v = (flags[name] for name in ("seq-length", "hidden-size", "num-layers", "vocab-size"))
        return 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))

    def state(self) -> Weights:
        """Return the tensors of a checkpoint, by their names there."""
        found = {f"model.{name}": t.detach() for name, t in self.weights.items()}
        for name, t in self.weights.items():
            moments = self.optimizer.state.get(t, {})
            found |= {f"{m}.{name}": moments[m] for m in ("exp_avg", "exp_avg_sq") if moments}
        return found


def read_checkpoint(folder: Path) -> Weights:
    """The tensors of a checkpoint, put together from its manifest's chunks."""
    manifest = json.loads((folder / "manifest.json").read_text())
    found = {}
    for name, entry in manifest["tensors"].items():
        found[name] = torch.full(entry["shape"], math.nan, dtype=getattr(torch, entry["dtype"]))
        tiling = manifest["tilings"][entry["tiling"]]
        for offset, size, chunk_file in zip(tiling["offset"], tiling["size"], tiling["file"], strict=True):
            where = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            with safe_open(folder / chunk_file, "pt") as file:
                found[name][where] = file.get_tensor(f"{name}@{','.join(map(str, offset))}")
    return found
