"""`resolve` makes the final configuration and the layout of its ranks from the flags. Pure."""

import dataclasses
import difflib
import fnmatch
import math

from megazero.engine.options.optimizers import BLOCK, MOST_BLOCKS
from megazero.engine.plan.layout.dealing import dealt_multiple
from megazero.engine.plan.layout.layers import Declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.flags.batch_ramp import batch_sizes
from megazero.flags.config import ActivationConfig, Config, DataConfig, ParallelConfig
from megazero.flags.flag_names import as_flag
from megazero.flags.limit_checks import divisors, shorten
from megazero.flags.pipeline_split import layer_costs, layer_split
from megazero.flags.validate import check_values, ring_refusal
from megazero.units import did_you_mean

# Blocks x micro-batches of a rank in an iteration: its program is a list with operations for each of them.
MAX_BLOCK_RUNS = 2**17


def resolve(config: Config, world_size: int, vocab_size: int, declare: Declare) -> tuple[Config, Layout]:
    """Return the final config, with every derived value filled in, and the layout of the ranks.

    Args:
        world_size: number of ranks.
        vocab_size: of the tokenizer; 0 when there is none.
        declare: lists the layers of a model. It is called only if a pipeline or frozen weights need them.

    Raises:
        ValueError: naming the flag, its value and the way out.
    """
    layout = check_layout(config, world_size)
    vocabulary = config.model.vocab_size or vocab_size
    if not vocabulary and config.data.mock_data:
        raise ValueError(
            "--mock-data needs --vocab-size, the number of tokens to draw from, such as --vocab-size 50257"
        )
    if not vocabulary:
        raise ValueError(
            "--tokenizer and --vocab-size are missing, and no PREFIX.json of --data-path names a tokenizer; "
            "give --tokenizer PATH: a tokenizer.json, vocab.json with merges.txt, a SentencePiece .model, a "
            "tiktoken file, or a folder with one of them; or --tokenizer byte"
        )
    if vocabulary < vocab_size:
        raise ValueError(
            f"--vocab-size {vocabulary} is smaller than the {vocab_size} tokens of --tokenizer "
            f"{config.data.tokenizer}; use at least {vocab_size}, or leave it out"
        )
    replace = dataclasses.replace
    model = replace(config.model, vocab_size=vocabulary, ffn_hidden_size=config.model.ffn_size)
    config = replace(
        config,
        model=model,
        training=replace(
            config.training, global_batch_size=_global_batch(config, layout), grad_dtype=_grad_dtype(config)
        ),
        optimizer=replace(
            config.optimizer,
            lr_decay_iters=config.optimizer.lr_decay_iters or config.training.train_iters,
        ),
        data=_by_document(config.data),
    )
    if not config.trains:  # it saves and keeps nothing; the flags may come from the preset of the training run
        checkpoint = replace(config.checkpoint, save="", save_hf="")
        config = replace(config, checkpoint=checkpoint, activations=ActivationConfig())
    _check_ramp(config)
    model, activations = config.model, config.activations
    layout = replace(layout, split=layer_split(config, lambda: layer_costs(declare(model), model, activations)))
    check_block_runs(config, layout)
    if config.optimizer.adam_moments != "fp32":
        _check_blocks(config, layout, declare)
    if config.training.freeze_parameters:
        names = [spec.name for spec in declare(config.model).params()]
        _check_frozen(names, config.training.freeze_parameters)
    return config, layout


def _by_document(data: DataConfig) -> DataConfig:
    """Return the options in which packed documents do not see each other."""
    if data.packing == "split":
        return data
    return dataclasses.replace(data, reset_attention_mask=True, reset_position_ids=True)


def check_layout(config: Config, world_size: int) -> Layout:
    """Return the layout of a checked configuration, with layers split evenly. Raises as `resolve`."""
    check_values(config)
    _check_schedule(config)
    _check_context(config)
    return make_layout(config, world_size)


def _check_blocks(config: Config, layout: Layout, declare: Declare) -> None:
    """Refuse weights with more blocks of small moments than are numbered, and ranks that share a block."""
    moments = f"--adam-moments {config.optimizer.adam_moments}"
    for spec in declare(config.model, layout.tp).params():
        if spec.blocked and math.prod(spec.shape) >= MOST_BLOCKS * BLOCK:
            numel = f"{math.prod(spec.shape):,}"
            raise ValueError(f"{moments}: {spec.name} has too many elements, {numel}; use --adam-moments fp32")
        axis = dict(spec.sharded).get(len(spec.shape) - 1)
        if not spec.blocked or axis is None or spec.shape[-1] // layout.sizes[axis] % BLOCK == 0:
            continue
        blocks = spec.shape[-1] // BLOCK
        flag = "tensor-model-parallel-size" if axis == "tp" else "expert-tensor-parallel-size"
        sizes = ", ".join(str(n) for n in divisors(layout.sizes[axis]) if blocks % n == 0)
        shared = "share an exponent" if config.optimizer.adam_moments == "int8" else "are rounded together"
        raise ValueError(
            f"{moments} with --{flag} {layout.sizes[axis]}: it cuts the {blocks} blocks of {BLOCK} columns of "
            f"{spec.name}, which {shared}; use a --{flag} of {sizes}, or --adam-moments fp32"
        )


def _check_ramp(config: Config) -> None:
    """Check that INCREMENT of --rampup-batch-size leads from START to --global-batch-size."""
    ramp, sizes = config.training.rampup_batch_size, batch_sizes(config)
    if not ramp:
        return
    given, between = f"--rampup-batch-size {' '.join(map(str, ramp))}", sizes.full - sizes.start
    if between <= 0:
        raise ValueError(
            f"{given}: START must be less than --global-batch-size {sizes.full}; lower it, or drop the flag"
        )
    if between % sizes.increment:
        fits = sorted(divisors(between), key=lambda n: abs(n - sizes.increment))[:2]
        raise ValueError(
            f"{given}: INCREMENT must divide the {between} samples between START and --global-batch-size {sizes.full}; "
            f"use {' or '.join(map(str, sorted(fits)))}"
        )


def check_block_runs(config: Config, layout: Layout) -> None:
    """Check that a rank's program is short enough to be made in reasonable time."""
    micro_batches, blocks = config.micro_batches(layout.dp), -(-config.model.num_layers // layout.pp)
    if micro_batches * blocks > MAX_BLOCK_RUNS:
        most = max(1, MAX_BLOCK_RUNS // blocks)
        fits = most * config.training.micro_batch_size * layout.dp
        raise ValueError(
            f"--global-batch-size {config.training.global_batch_size} is {micro_batches} micro-batches of "
            f"{config.training.micro_batch_size} samples per rank, through {blocks} layers each: more than "
            f"{MAX_BLOCK_RUNS} in all; use at most {fits}, a larger --micro-batch-size, or more ranks"
        )


def _check_frozen(names: list[str], patterns: tuple[str, ...]) -> None:
    """Check that every pattern of --freeze-parameters matches a parameter, and that some parameter matches none."""
    trained = set(names)
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            close = difflib.get_close_matches(pattern, names[:14] + names[-4:], n=1, cutoff=0.0)[0]
            raise ValueError(
                f"--freeze-parameters {shorten(pattern)}: matches no parameter; names look like {close}; "
                "correct it, or leave it out"
            )
        trained -= set(matched)
    if not trained:
        raise ValueError(
            f"--freeze-parameters {shorten(' '.join(patterns))}: matches all {len(names)} parameters, so that nothing "
            "is left to train; match fewer"
        )


def replica_layout(parallel: ParallelConfig) -> Layout:
    """Return the layout of the ranks that compute a sample together."""
    cp = parallel.context_parallel_size
    return Layout(parallel.pipeline_model_parallel_size, 1, parallel.tensor_model_parallel_size, cp=cp)


def replica_words(parallel: ParallelConfig) -> str:
    """Name the flags of `replica_layout` and their product."""
    replica = replica_layout(parallel)
    context = f" x --context-parallel-size {replica.cp}" if replica.cp > 1 else ""
    return (
        f"--tensor-model-parallel-size {replica.tp}{context} x --pipeline-model-parallel-size {replica.pp} = "
        f"{replica.world_size}"
    )


def make_layout(config: Config, world_size: int) -> Layout:
    """Return the layout of `world_size` ranks: pp, cp and tp are flags, dp is derived, layers are split evenly."""
    replica = replica_layout(config.parallel)
    once = replica.world_size
    if world_size % once:
        fits = max(1, world_size // once) * once
        raise ValueError(
            f"{replica_words(config.parallel)} does not divide the {world_size} ranks that were started; start {fits} "
            f"or {fits + once} (bash scripts/launch.sh --nproc {fits} ...), or change either"
        )
    whole, shards = dataclasses.replace(replica, dp=world_size // once), config.zero.zero_shard_size
    if shards and shards not in divisors(whole.data):
        sizes = ", ".join(str(n) for n in divisors(whole.data) if n > 1)
        raise ValueError(
            f"--zero-shard-size {shards} does not divide the {whole.data} data-parallel ranks"
            f"{' (x context-parallel)' if replica.cp > 1 else ''}; use {f'{sizes}, or ' if sizes else ''}0 for all"
        )
    parallel = config.parallel
    _check_experts(config, whole)
    return dataclasses.replace(
        whole,
        shards=shards,
        chunks=parallel.virtual_pipeline_stages,
        v_shaped=SCHEDULES[parallel.pipeline_schedule].v_shaped,
        ep=parallel.expert_model_parallel_size,
        expert_tp=parallel.expert_tensor_parallel_size,
    )


def _check_experts(config: Config, layout: Layout) -> None:
    """Refuse a division of experts that the ranks of a stage do not allow. layout: of the ranks, without experts."""
    parallel, model, shards = config.parallel, config.model, config.zero.zero_shard_size
    ep, etp, tp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or layout.tp, layout.tp
    if ep == 1 and etp == tp:
        return
    flag, ranks, copy = as_flag("expert-model-parallel-size", ep), layout.stride("pp"), ep * etp
    if etp != tp:
        flag = as_flag("expert-tensor-parallel-size", etp)
    if not model.num_experts:
        raise ValueError(f"{flag} needs --num-experts E; add it, or drop the flag")
    if tp % etp:
        sizes = ", ".join(map(str, divisors(tp)))
        raise ValueError(f"{flag} does not divide --tensor-model-parallel-size {tp}; use one of {sizes}")
    if model.num_experts % ep or ranks % copy:
        fits = [n for n in divisors(model.num_experts) if ranks // etp % n == 0]
        raise ValueError(
            f"--expert-model-parallel-size {ep} must divide --num-experts {model.num_experts}, and {ep} x {etp} (ranks "
            f"per expert) the {ranks} ranks of a pipeline stage; use one of {', '.join(map(str, fits))}"
        )
    if tp > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"{flag} with --tensor-model-parallel-size {tp}: tensor-parallel ranks must have tokens of their own to "
            "send; add --sequence-parallel"
        )
    within = dataclasses.replace(layout, shards=shards).stride("replica")
    if shards and within % copy:
        raise ValueError(
            f"--zero-shard-size {shards} with {flag}: its {within} ranks, tensor-parallel ones included, must "
            f"hold whole copies of the experts, on {copy} ranks each; use another, or 0 for all"
        )


def _check_schedule(config: Config) -> None:
    """Check the schedule's name, and the options that only some schedules have."""
    parallel, layers = config.parallel, config.model.num_layers
    pp, chunks, name = (
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_stages,
        parallel.pipeline_schedule,
    )
    schedule = SCHEDULES.get(name)
    if schedule is None:
        hint = did_you_mean(name, SCHEDULES)
        known = "; ".join(filter(None, [", ".join(SCHEDULES), hint]))
        raise ValueError(f"--pipeline-schedule {name} is unknown; use one of {known}")
    if schedule.virtual_stages != (chunks > 1):
        virtual = [known for known in SCHEDULES if SCHEDULES[known].virtual_stages]
        raise ValueError(
            f"--virtual-pipeline-stages {chunks} with --pipeline-schedule {name}: {', '.join(virtual)} needs at least "
            "2 virtual stages per rank, and the other schedules have none; give both, or neither"
        )
    if schedule.v_shaped and chunks != 2:
        raise ValueError(
            f"--virtual-pipeline-stages {chunks} with --pipeline-schedule {name}: a V has 2 virtual stages per rank; "
            "use 2, or interleaved"
        )
    if schedule.virtual_stages and pp == 1:
        raise ValueError(
            f"--pipeline-schedule {name} needs a pipeline, and --pipeline-model-parallel-size is 1; raise it, or use "
            "1f1b"
        )
    if layers < pp * chunks:
        fits = "a --pipeline-schedule without virtual stages"
        if layers // pp > 1:
            fits = f"at most {layers // pp} virtual stages"
        elif layers // chunks > 1:
            fits = f"at most {layers // chunks} stages"
        raise ValueError(
            f"--virtual-pipeline-stages {chunks} x --pipeline-model-parallel-size {pp} = {pp * chunks} is more than "
            f"--num-layers {layers}: a virtual stage would hold no layer; use {fits}"
        )
    if parallel.zero_bubble_backlog and not schedule.backlog:
        raise ValueError(
            f"--zero-bubble-backlog {parallel.zero_bubble_backlog} applies to --pipeline-schedule "
            f"{', '.join(known for known in SCHEDULES if SCHEDULES[known].backlog)}, not {name}; add that, or drop it"
        )


def _check_context(config: Config) -> None:
    """Refuse more context-parallel ranks than there are tokens, and a ring where attention gathers all keys."""
    parallel, model, multiple = config.parallel, config.model, dealt_multiple(config)
    cp, most = parallel.context_parallel_size, model.seq_length // multiple
    if cp > most:
        reason = f"; with --sequence-parallel, a rank's tokens are a multiple of {multiple}" if multiple > 1 else ""
        raise ValueError(
            f"--context-parallel-size {cp} is too large for --seq-length {model.seq_length}: every rank needs tokens"
            f"{reason}; use at most {most}, or longer samples"
        )
    if parallel.cp_exchange != "auto" and cp == 1:
        raise ValueError(
            f"--cp-exchange {parallel.cp_exchange} needs a --context-parallel-size of at least 2; raise it, or use "
            "--cp-exchange auto"
        )
    if parallel.cp_exchange == "ring" and (reason := ring_refusal(config)):
        raise ValueError(f"--cp-exchange ring with {reason}; use all-gather, or auto")


def _grad_dtype(config: Config) -> str:
    """Return --grad-dtype; in an fp64 run, fp64, because `check_values` allows no other there."""
    return "fp64" if config.training.precision == "fp64" else config.training.grad_dtype


def _global_batch(config: Config, layout: Layout) -> int:
    """Return --global-batch-size; unless given, one micro-batch per data-parallel rank."""
    return config.training.global_batch_size or config.training.micro_batch_size * layout.dp
