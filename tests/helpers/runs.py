"""Runs put together as `pretrain_gpt.py` does it."""

from pathlib import Path

from megazero.data.corpora import Datasets
from megazero.data.tokenizer import Tokenizer
from megazero.engine.mesh.mesh import Mesh
from megazero.flags.config import Config
from megazero.run.checkpoints import CheckpointLoader, Checkpoints
from megazero.run.stopping import Wishes
from megazero.run.trainer import Trainer
from megazero.run.training_run import TrainingRun


def new_run(
    config: Config, mesh: Mesh, datasets: Datasets, eod: int | None = None, tokenizer: Tokenizer | None = None
) -> TrainingRun:
    """Return one rank's run. `config`: resolved."""
    trainer = Trainer(config, mesh, datasets, eod, tokenizer=tokenizer)
    saves = Checkpoints(trainer.config, trainer.engine, datasets, tokenizer, trainer.watchdog)
    stop_file = Path(config.log.log_dir) / "stop" if config.log.log_dir and mesh.rank == 0 else None
    return TrainingRun(trainer, CheckpointLoader(saves), Wishes(stop_file=stop_file))
