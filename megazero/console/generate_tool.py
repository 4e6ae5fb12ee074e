"""Generate text from a checkpoint of any layout: in one process, or on ranks that share the model and the prompts."""

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import tyro
from tyro.conf import FlagCreatePairsOff

from megazero import checkpoint
from megazero.cluster import launch
from megazero.data.tokenizer import Tokenizer, asked_beginning, end_of_document
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.files import explain, read_regular
from megazero.flags.cli import read_flags
from megazero.flags.config import Config, ModelConfig, ParallelConfig
from megazero.flags.resolve import resolve
from megazero.generation.generate import Generator, Text, packed_prompts
from megazero.generation.guesses import Guesses
from megazero.generation.model import InferenceModel
from megazero.generation.sampling import Sampling
from megazero.log import log, log_as
from megazero.run.run_state import RunState, other_folder, require_ids, tokenizer_for
from megazero.world import World, read_world

TIMEOUT_MINUTES = 10.0


@dataclass(frozen=True)
class GenerateOptions:
    """Generate text from a checkpoint of any layout. Each text is printed with its prompt.

    examples:
      python scripts/generate.py --load runs/a --prompt "HAMLET:" --prompt "OPHELIA:" --max-new-tokens 100
      PROGRAM=scripts/generate.py bash scripts/launch.sh --nproc 2 --load runs/a --tensor-model-parallel-size 2
    """

    load: str
    """Folder of checkpoints, or one of its iter_NNNNNNN."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; may be given several times. Without any prompt, a new line."""
    prompt_file: str = ""
    """File with a prompt per line; in a .jsonl file a line is an object with the text as `prompt`."""
    tokenizer: str = ""
    """Tokenizer, as --tokenizer of pretrain_gpt.py, with as many tokens as the run's. Empty: the run's own, from the
    checkpoint."""
    prepend_bos: FlagCreatePairsOff[bool] = False
    """Begin each prompt with the tokenizer's beginning-of-text token, or tokens. Default: those that its
    post-processor puts before a text. A prompt never begins with them twice."""
    no_prepend_bos: FlagCreatePairsOff[bool] = False
    """Leave the beginning-of-text token out."""
    max_new_tokens: int = 100
    """Tokens to generate at most for each text. An end-of-document token, the eos_token, or an end that the model's
    generation_config.json names, ends it earlier. After --seq-length tokens, the model attends to the last of them
    only, and each token takes the time of a whole window."""
    temperature: float = 0.8
    """Divides the logits. 0: always the likeliest token."""
    top_k: int = 50
    """Number of likeliest tokens to draw from. 0: all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this sum."""
    num_samples: int = 1
    """Texts to generate for each prompt."""
    batch_size: int = 16
    """Texts that each data-parallel rank generates at once. They take memory for keys and values."""
    seed: int = 1234
    """Seed of the draws. A text does not depend on the others of its batch."""
    json: bool = False
    """Print a JSON object per text instead: prompt, completion, finish (end of document, or length), tokens."""
    count_guesses: bool = False
    """Print how many of the new tokens the modules of --mtp-num-layers would have guessed. Each text is computed once
    more, all of it at once."""
    tensor_model_parallel_size: int = 1
    """Ranks that share every matrix of a layer; start them with torchrun, srun or scripts/launch.sh."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers. Ranks beyond tensor x context x pipeline generate other texts."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of each prompt, and the keys and values of all tokens, for texts that are too long
    for one device."""


def _read_prompts(options: GenerateOptions) -> list[str]:
    """Return all prompts. ValueError, naming the flag, if one is empty or the file cannot be read."""
    prompts = list(options.prompt)
    if options.prompt_file:
        try:
            lines = read_regular(options.prompt_file).decode().splitlines()
        except (OSError, ValueError) as error:
            reason = explain(error) if isinstance(error, OSError) else error
            raise ValueError(f"--prompt-file {options.prompt_file}: {reason}") from None
        as_json = options.prompt_file.endswith(".jsonl")
        prompts += [_prompt_of(options.prompt_file, i, line) if as_json else line for i, line in enumerate(lines, 1)]
    if not all(prompts):
        raise ValueError("--prompt is empty, or a line of --prompt-file; give at least one character")
    if options.prompt_file and not prompts:
        raise ValueError(f"--prompt-file {options.prompt_file} has no line; give a prompt per line")
    return prompts or ["\n"]


def _prompt_of(path: str, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError, RecursionError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError(f"--prompt-file {path}: line {number} is no JSON object with a text as `prompt`")
    return prompt


def _layout_of(model: ModelConfig, options: GenerateOptions, world: World) -> Layout:
    """Return the layout of the ranks that were started. ValueError if it does not divide the model or the ranks."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        context_parallel_size=options.context_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
    )
    _, layout = resolve(Config(model=model, parallel=parallel), world.size, 0, declare)
    return layout


def _show(texts: list[Text], tokenizer: Tokenizer, as_json: bool, several: bool) -> None:
    begin = len(tokenizer.bos)
    for text in texts:
        if as_json:
            prompt, completion = (tokenizer.decode(ids) for ids in (text.ids[begin : text.num_prompt], text.new_ids))
            record = {"prompt": prompt, "completion": completion, "finish": text.finish, "tokens": len(text.new_ids)}
            print(json.dumps(record), flush=True)
        else:
            whole = tokenizer.decode(text.ids[begin:])
            print(f"{whole}\n{'-' * 40}" if several else whole, flush=True)


def generate_texts(options: GenerateOptions, world: World) -> None:
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    for flag in ("max_new_tokens", "num_samples", "batch_size"):
        if getattr(options, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: must be at least 1")
    path = checkpoint.find(Path(options.load))
    if path is None:
        raise ValueError(f"--load {options.load} holds no checkpoint; {other_folder(Path(options.load))}")
    state = RunState.read(path)
    model = state.model_config(path)
    layout = _layout_of(model, options, world)
    if options.count_guesses and not model.mtp_num_layers:
        raise ValueError("--count-guesses: the model has no modules of --mtp-num-layers; drop it")
    if options.count_guesses and options.context_parallel_size > 1:
        raise ValueError("--count-guesses with --context-parallel-size above 1: each text is on one rank; drop one")
    tokenizer = tokenizer_for(options.tokenizer, path, state, model.vocab_size)
    tokenizer = tokenizer.prepending(asked_beginning(options.prepend_bos, options.no_prepend_bos))
    prompts = [ids for ids in tokenizer.encode_texts(_read_prompts(options)) for _ in range(options.num_samples)]
    if not all(prompts):
        raise ValueError("--prompt has no token; give other text")
    require_ids("--prompt", prompts, tokenizer, model.vocab_size)
    if tokenizer.bos and world.rank == 0:
        print(f"prompts begin with {tokenizer.shown(*tokenizer.bos)}", file=sys.stderr)
    device = launch.pick_device(world)
    hosts = launch.start(world, device, TIMEOUT_MINUTES)
    mesh = Mesh.build(layout, world.rank, device, TIMEOUT_MINUTES, check_buffers=False, hosts=hosts)
    inference = InferenceModel(path, model, mesh, state.master_precision)
    eod, data = end_of_document(tokenizer), state.config.get("data")
    if isinstance(data, dict) and (note := packed_prompts(data, [ids[len(tokenizer.bos) :] for ids in prompts], eod)):
        log.warning(note)
    guesses = Guesses(inference) if options.count_guesses else None
    generator = Generator(
        model=inference,
        sampling=sampling,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        ends=tokenizer.ends,
    )
    if guesses is not None:
        generator = replace(generator, on_batch=guesses.texts.extend)
    start, tokens = time.perf_counter(), 0
    for texts in generator.run(prompts):
        _show(texts, tokenizer, options.json, several=len(prompts) > 1)
        tokens += sum(len(text.new_ids) for text in texts)
    if world.rank == 0:
        seconds = time.perf_counter() - start
        rate = f"{tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.1f} tokens/s"
        print(f"generated {rate}", file=sys.stderr, flush=True)
    if guesses is not None:
        summary = guesses.summary()
        if world.rank == 0:
            print(summary, file=sys.stderr, flush=True)
    launch.stop(world, TIMEOUT_MINUTES)


def _fail(message: str) -> NoReturn:
    """Report the failure and end this process at once, so that other ranks' waits for it fail."""
    log.error(message)
    launch.exit_now(1)


def run_generate(argv: list[str]) -> NoReturn:
    """Run a command line, and end the process."""
    chosen = read_flags(GenerateOptions, argv, "scripts/generate.py")
    try:
        ranks = read_world()
        log_as(ranks.rank, ranks.size)
        launch.end_with_launcher(ranks)
        generate_texts(chosen, ranks)
        launch.exit_now(0)
    except ValueError as error:
        _fail(f"error: {error}")
    except KeyboardInterrupt:
        launch.exit_now(130)
    except Exception as error:
        import traceback

        traceback.print_exc()
        _fail(f"{type(error).__name__}: {error}")
