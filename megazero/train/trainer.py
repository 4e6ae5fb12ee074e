"""A pretraining run: checks, start or resume, the loop, evaluation, saving. Straight code, in the order of events."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megazero import checkpoint
from megazero.comm.mesh import Mesh
from megazero.config.schema import Config, ModelConfig
from megazero.data.indexed import IndexedDataset
from megazero.data.loader import Batches
from megazero.data.samples import Datasets, open_datasets, parse_data_path, read_about, validate
from megazero.memory.fragmentation import device_fragmentation
from megazero.plan.parameters import num_parameters
from megazero.price.flops import model_flops
from megazero.price.report import table
from megazero.train.engine import Engine, LossScaleExhausted, StepResult
from megazero.train.loggers import Record, open_writers

# Of the model's configuration, what a checkpoint must agree on: the shapes of its tensors.
SHAPE_FLAGS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "vocab_size"),
    "untie_embeddings",
)


@dataclass
class Progress:
    """How far the run is; saved with every checkpoint."""

    iteration: int = 0
    consumed_samples: int = 0


def open_data(config: Config, tokens: int) -> Datasets:
    """The corpora, checked. `tokens`: of the tokenizer; 0 when there is none.

    Raises:
        ValueError: see `data.samples`; also when no data is named, or it was made with another tokenizer.
    """
    data = config.data
    if not data.data_path:
        raise ValueError(
            "--data-path is missing; give the PREFIX of a .bin/.idx pair, which data_tools/preprocess_data.py makes"
        )
    model, seed = config.model, config.training.seed
    evaluates = config.evaluation.eval_interval > 0
    for _, prefix in parse_data_path(data.data_path):
        about = read_about(IndexedDataset(prefix))
        if tokens and about.get("vocab_size", tokens) != tokens:
            raise ValueError(
                f"--data-path {prefix} was made with the tokenizer {about['tokenizer']}, "
                f"of {about['vocab_size']} tokens; --tokenizer {data.tokenizer} has {tokens}; name the same one"
            )
    validate(data.data_path, data.split, model.seq_length, model.vocab_size, evaluation=evaluates)
    return open_datasets(data.data_path, data.split, model.seq_length, seed, model.vocab_size)


def find_checkpoint(config: Config) -> Path | None:
    """What --load names, checked to be this model's; None: start afresh. Among ranks, what rank 0 finds.

    Raises:
        ValueError: it is damaged, or of another model.
    """
    load, save = config.checkpoint.load, config.checkpoint.save
    if not load:
        if save and (there := checkpoint.find(Path(save))) is not None:
            raise ValueError(
                f"--save {save} holds {there.name} of an earlier run; add --load {save} to go on with it, "
                "or name another folder"
            )
        return None
    path = checkpoint.find(Path(config.checkpoint.load))
    if path is not None:
        check_model(path, checkpoint.read_state(path)["model"], config.model)
    return path


def check_model(path: Path, saved: dict[str, Any], model: ModelConfig) -> None:
    ours = asdict(model)
    wrong = [
        f"--{key.replace('_', '-')} {saved[key]}, not {ours[key]}" for key in SHAPE_FLAGS if saved[key] != ours[key]
    ]
    if wrong:
        raise ValueError(f"--load {path}: the checkpoint of another model: it has {'; '.join(wrong)}")


class Trainer:
    """One rank's run."""

    def __init__(self, config: Config, mesh: Mesh, datasets: Datasets, eod: int | None) -> None:
        """`config` is resolved; `eod`: the end-of-document token where targets behind it are masked, else None."""
        self.config, self.mesh = config, mesh
        self.leads = mesh.rank == 0
        self.engine = Engine(config, mesh)
        self.progress = Progress()
        self.saved_at: int | None = None  # iteration of the newest checkpoint in --save

        def batches(dataset: Any, num_workers: int) -> Batches:
            return Batches(
                dataset,
                config.training.micro_batch_size,
                config.micro_batches(mesh.layout.dp),
                mesh.dp.rank,
                mesh.dp.size,
                eod=eod,
                num_workers=num_workers,
            )

        self.train_batches = batches(datasets.train, config.data.num_workers)
        self.validation_batches = batches(datasets.validation, 0)

    def say(self, text: str) -> None:
        if self.leads:
            print(text, flush=True)

    def run(self, load: Path | None) -> None:
        """Train from `load`, or from the beginning, to --train-iters or the next --exit-interval."""
        config = self.config
        if load is not None:
            self.load(load)
        self.describe(load)
        writers = open_writers(config, self.progress.iteration) if self.leads else []
        try:
            while self.progress.iteration < config.training.train_iters:
                try:
                    record = self.iterate()
                except LossScaleExhausted:
                    self.save()  # what the last good update made
                    raise
                for writer in writers:
                    writer.write(record)
                if self._due(config.checkpoint.save_interval):
                    self.save()
                if self._due(config.checkpoint.exit_interval):
                    self.say(f"--exit-interval {config.checkpoint.exit_interval}: stopping")
                    break
        finally:
            for writer in writers:
                writer.close()
        self.save()
        self.engine.wait()

    def _due(self, interval: int) -> bool:
        return interval > 0 and self.progress.iteration % interval == 0

    def iterate(self) -> Record:
        """One training step, and an evaluation where it is due."""
        config, mesh, progress = self.config, self.mesh, self.progress
        sent, start = mesh.sent(), time.perf_counter()
        batches = self.train_batches.batch(progress.consumed_samples)
        result = self.engine.train_step(progress.iteration + 1, batches)
        seconds = time.perf_counter() - start
        progress.iteration += 1
        progress.consumed_samples += config.training.global_batch_size
        traffic = {kind: total - sent[kind] for kind, total in mesh.sent().items()}
        record = self._record(result, seconds, traffic)
        if result.culprit is not None:
            self.say(f"iteration {progress.iteration} makes no update: {result.culprit}")
        if self._due(config.evaluation.eval_interval):
            record["validation_loss"] = self.evaluate()
        return record

    def _record(self, result: StepResult, seconds: float, traffic: dict[str, int]) -> Record:
        config = self.config
        samples = config.training.global_batch_size
        flops = model_flops(config.model, samples) / self.mesh.layout.world_size
        record = {
            "iteration": self.progress.iteration,
            "consumed_samples": self.progress.consumed_samples,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "loss_scale": result.loss_scale,
            "skipped": result.skipped,
            "step_seconds": seconds,
            "tokens_per_second": samples * config.model.seq_length / seconds,
            "tflops_per_device": flops / seconds / 1e12,
            "memory_bytes": self.engine.memory_bytes(result),
            "traffic_bytes": traffic,
        }
        # A snapshot costs: only the rank that writes takes it, and as often as a person reads.
        if self.leads and self._due(config.log.log_interval):
            found = device_fragmentation(self.mesh.device)
            if found is not None:
                record["fragmentation"] = found._asdict()
        return record

    def evaluate(self) -> float:
        """Cross-entropy over the first --eval-iters global batches of the validation split, in nats a target."""
        total, targets = 0.0, 0
        for i in range(self.config.evaluation.eval_iters):
            batches = self.validation_batches.batch(i * self.config.training.global_batch_size)
            loss, count = self.engine.evaluate(batches)
            total, targets = total + loss, targets + count
        return total / targets if targets else math.nan

    # -- checkpoints

    def save(self) -> None:
        """Into --save, once an iteration."""
        root, iteration = self.config.checkpoint.save, self.progress.iteration
        if not root or self.saved_at == iteration:
            return
        start = time.perf_counter()
        state = asdict(self.progress) | self.engine.state_dict()
        state |= {
            "model": asdict(self.config.model),
            "layout": asdict(self.mesh.layout),
            "config": asdict(self.config),
        }
        self.engine.wait()
        path = checkpoint.save(Path(root), iteration, self.engine.shards(), state, self.mesh.host_group)
        self.saved_at = iteration
        self.say(f"saved {path} in {time.perf_counter() - start:.1f} s")
        if self.leads and self.config.checkpoint.keep_last:
            checkpoint.prune(Path(root), self.config.checkpoint.keep_last)

    def load(self, path: Path) -> None:
        start = time.perf_counter()
        self.engine.wait()
        shards = self.engine.shards()
        self.mesh.in_flight.check("loading a checkpoint", writes=[shard.data for shard in shards.values()])
        checkpoint.load(path, shards, self.mesh.host_group)
        state = checkpoint.read_state(path)
        self.engine.load_state_dict(state)
        self.progress = Progress(state["iteration"], state["consumed_samples"])
        self._say_differences(state["config"])
        if path.parent.resolve() == Path(self.config.checkpoint.save or ".").resolve():
            self.saved_at = self.progress.iteration
        self.say(f"loaded {path} in {time.perf_counter() - start:.1f} s")

    def _say_differences(self, saved: dict[str, Any]) -> None:
        """What this run does otherwise than the one that it goes on from; some of it changes the curve."""
        ours = json.loads(json.dumps(asdict(self.config)))
        for group, options in saved.items():
            if group in ("log", "checkpoint", "preset") or not isinstance(options, dict):
                continue
            for name, value in options.items():
                if name in ours[group] and ours[group][name] != value:
                    self.say(f"--{name.replace('_', '-')} is {ours[group][name]}, and was {value} when this was saved")

    def describe(self, load: Path | None) -> None:
        """What is about to run, said once."""
        config, layout = self.config, self.mesh.layout
        total = num_parameters(config.model)
        batch = f"{config.training.global_batch_size} = {config.micro_batches(layout.dp)} micro-batches"
        self.say(
            f"{total / 1e6:,.1f} M parameters, {config.training.precision}, on {layout.world_size} x "
            f"{self.mesh.device.type}: {layout}, ZeRO stage {config.zero.zero_stage}; global batch {batch} "
            f"x {config.training.micro_batch_size} x {layout.dp} data-parallel ranks"
        )
        self.say(table(config, layout, staged=self.mesh.device.type == "cpu"))
        if config.checkpoint.load and load is None:
            self.say(f"--load {config.checkpoint.load} holds no checkpoint: starting afresh")
        if self.progress.iteration >= config.training.train_iters:
            done, asked = self.progress.iteration, config.training.train_iters
            self.say(f"iteration {done} is done, and --train-iters is {asked}: nothing to do")
        elif load is not None:
            self.say(f"going on after iteration {self.progress.iteration}")
