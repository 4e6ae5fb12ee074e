"""A checkpoint as a model of lm-eval (https://github.com/EleutherAI/lm-evaluation-harness), without an export.

Example: python -m megazero.interop.lm_eval_model run --model megazero --model_args load=runs/a --tasks hellaswag
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megazero import checkpoint
from megazero.cluster import launch
from megazero.data.task_requests import Pair
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.layout.topology import Layout
from megazero.generation.generate import Generator
from megazero.generation.model import InferenceModel
from megazero.generation.sampling import Sampling
from megazero.run.run_state import RunState, other_folder, require_ids, tokenizer_for
from megazero.world import read_world

MODEL_NAME = "megazero"  # of --model
BATCH_SIZE = 16  # sequences that are computed together, by default
NEW_TOKENS = 256  # lm-eval's default
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class CheckpointScorer:
    """The methods of lm-eval's `TemplateLM`, computed in one process by the checkpoint's model in its master precision.

    `lm_eval_class` joins them with lm-eval's class, which encodes contexts and continuations.
    """

    def __init__(
        self,
        load: str,
        tokenizer: str = "",
        batch_size: int | str = BATCH_SIZE,
        seed: int = 1234,
        add_bos_token: bool | None = None,
        **ignored: object,
    ) -> None:
        """Load a checkpoint of any layout.

        Args:
            load: folder of checkpoints, or one of its iter_NNNNNNN.
            tokenizer: as --tokenizer; empty: the run's own, from the checkpoint.
            batch_size: sequences that are computed together; auto: the default.
            seed: of sampled texts.
            add_bos_token: begin each text with the tokenizer's beginning; by default as its post-processor does.
            ignored: options of lm-eval for other models, such as max_batch_size and device.

        Raises:
            ValueError: there are several ranks, there is no checkpoint, or no tokenizer with an end-of-document token.
        """
        super().__init__()
        if (world := read_world()).has_peers:
            raise ValueError(f"--model megazero on {world.size} ranks: it computes in one process; start one")
        path = checkpoint.find(Path(load))
        if path is None:
            raise ValueError(f"load={load} holds no checkpoint; {other_folder(Path(load))}")
        state = RunState.read(path)
        model = state.model_config(path)
        self.text = tokenizer_for(tokenizer, path, state, model.vocab_size).prepending(add_bos_token)
        self.max_length, self.seed = model.seq_length, seed
        self.batch_size = BATCH_SIZE if str(batch_size).startswith("auto") else int(batch_size)
        device = launch.pick_device(world)
        self.inference = InferenceModel(path, model, Mesh.build(Layout(), 0, device), state.master_precision)

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self.text.eod

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for a missing context: the beginning of a text, or else the end of a document."""
        return self.text.bos[-1] if self.text.bos else self.text.eod

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: object) -> list[int]:
        """Encode a text, with its beginning unless `add_special_tokens` is False."""
        return (self.text.encode_batch if add_special_tokens is False else self.text.encode_texts)([string])[0]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **ignored: object
    ) -> list[tuple[float, bool]]:
        """Score (text, context, continuation), the latter two in token ids.

        Raises:
            ValueError: a continuation is longer than a sample.
        """
        for number, (text, _, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"request {number} of {len(requests)}, counted from 0: its continuation has {len(continuation)} "
                    f"tokens, more than --seq-length {self.max_length} of the checkpoint; leave the item out. Its text "
                    f"ends with {str(text)[-60:]!r}"
                )
        return self.score_pairs([self._pair(context, continuation) for _, context, continuation in requests])

    def _pair(self, context: list[int], continuation: list[int]) -> Pair:
        """Move the beginning of a text, which lm-eval 0.4.9 leaves before a continuation without context."""
        bos = list(self.text.bos)
        begun = bool(bos) and continuation[: len(bos)] == bos
        return Pair(bos, continuation[len(bos) :]) if begun else Pair(context, continuation)

    def score_pairs(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the model's likeliest."""
        for each in pairs:
            require_ids("a request", each, self.text, self.inference.model.vocab_size)
        found = []
        for at in range(0, len(pairs), self.batch_size):
            batch = [pair.fitted(self.max_length) for pair in pairs[at : at + self.batch_size]]
            for nats, likeliest in self.inference.target_scores(batch):
                found.append((-float(nats.double().sum()), bool(likeliest.all())))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows: docs/tasks.md."""
        before = list(self.text.bos) or [self.eot_token_id]
        texts = [Pair(before, self.text.encode(request.args[0])) for request in requests]
        windows = [list(text.windows(self.max_length)) for text in texts]
        scores = iter(self.score_pairs([window for of_text in windows for window in of_text]))
        return [sum(next(scores)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context, up to a stop sequence or a number of tokens."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, options: Mapping[str, Any]) -> str:
        stops = options.get("until") or []
        length = next((int(options[name]) for name in LIMITS if name in options), NEW_TOKENS)
        if length >= self.max_length:
            raise ValueError(
                f"max_gen_toks {length}: less than --seq-length {self.max_length} leaves room for a context"
            )
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        prompt = self.tok_encode(context)[length - self.max_length :] or [self.eot_token_id]
        require_ids("a request", [prompt], self.text, self.inference.model.vocab_size)
        generator = Generator(
            model=self.inference,
            sampling=Sampling(
                temperature, top_k=int(options.get("top_k", 0)), top_p=options.get("top_p", 1.0), seed=self.seed
            ),
            max_new_tokens=length,
            batch_size=1,
            ends=self.text.ends,
        )
        ((generated,),) = generator.run([prompt])
        text = self.text.decode(generated.new_ids)
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.split(stop)[0] if stop else text
        return text


def lm_eval_class() -> type[Any]:
    """Return the class of the model, a `TemplateLM` of lm-eval, and register it there as `MODEL_NAME`.

    Raises:
        ValueError: lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is missing; pip install lm-eval") from None
    found = type("CheckpointLM", (CheckpointScorer, TemplateLM), {})
    register_model(MODEL_NAME)(found)
    return found


def run_lm_eval() -> None:
    """Run lm-eval's command line with this model registered."""
    lm_eval_class()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    run_lm_eval()
