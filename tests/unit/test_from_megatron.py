"""scripts/from_megatron.py: our command line for a shell script of another system."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megazero.config.cli import parse
from megazero.config.foreign.script import find_launch, statements
from scripts.from_megatron import convert, main

MEGATRON = r"""#!/bin/bash
# a comment with a quote: don't
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=4
NODES=1
HIDDEN=${HIDDEN:-96}   # width
SAVE=$1
TOKENS=$(( 3 * 1000 * 64 ))
SIZE="large"
if [ $SIZE = "small" ]; then
    LAYERS=2
else
    LAYERS=$((2 * GPUS))
fi
cat <<EOT > ds.json
{ "stage": 1, "quote": "it's" }
EOT
LAUNCH=(
    --nproc_per_node $GPUS
    --nnodes $NODES
)
MODEL_ARGS=(
    --num-layers $LAYERS   # deep
    --hidden-size ${HIDDEN}
    --num-attention-heads 4
    "--seq-length 64"
    --max-position-embeddings 64
)
MODEL_ARGS+=(--global-batch-size 8)
OPTS=" --lr 1e-3 --bf16 \
       --train-tokens $TOKENS"
if [[ $GPUS -gt 1 && "$SIZE" == "large" ]]; then
    OPTS="$OPTS --tensor-model-parallel-size 2 --fp8-format hybrid"
fi
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} $OPTS \
    --save $SAVE --data-path 0.5 "${DATA_A}" 0.5 b --vocab-file v.json --merge-file m.txt 2>&1 | tee log.txt
"""
HUGGING_FACE = """
python -m torch.distributed.run --nproc-per-node 2 run_clm.py --model_type gpt2 --tokenizer_name t \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 3 --learning_rate 1e-4 --output_dir out --max_steps 9
"""


def flags_of(command: str) -> list[str]:
    words = shlex.split(command.replace("\\\n", " "))
    return words[words.index("4" if "--nproc" in words and "4" in words else "2") + 1 :]


def test_a_megatron_script_is_our_command() -> None:
    command, notes = convert(MEGATRON, {"1": "runs/a"})
    assert command.startswith("bash scripts/launch.sh --nproc 4 \\\n    --num-layers 8 --hidden-size 96")
    wanted = (
        "--num-layers 8 --hidden-size 96 --num-attention-heads 4 --seq-length 64 --global-batch-size 8 --lr 1e-3 "
        "--precision bf16 --train-iters 375 --tensor-model-parallel-size 2 --save runs/a "
        "--data-path 0.5 ${DATA_A} 0.5 b --tokenizer gpt2:v.json,m.txt --attention-dropout 0.1 --hidden-dropout 0.1 "
        "--lr-decay-style linear "
        "--eval-interval 1000 --eval-iters 100 --log-interval 100"
    )
    assert parse(flags_of(command)) == parse(wanted.split())
    assert any(note.startswith("not carried over: --fp8-format hybrid (Megatron-LM's)") for note in notes)
    assert any(note.startswith("${DATA_A} is not set in the script") for note in notes)
    assert "--hidden-size 32 " in convert(MEGATRON, {"1": "x", "HIDDEN": "32"})[0]


def test_a_hugging_face_script_keeps_its_own_defaults() -> None:
    command, _ = convert(HUGGING_FACE, {})
    assert command.startswith("bash scripts/launch.sh --nproc 2 ")
    wanted = (
        "--tokenizer t --micro-batch-size 2 --global-batch-size 12 --lr 1e-4 --save out --log-dir out --train-iters 9"
    )
    assert parse(flags_of(command)) == parse(wanted.split())


@pytest.mark.parametrize(
    "line",
    [
        "srun -l bash -c 'python -u pretrain_gpt.py --num-layers 3'",
        'CMD="deepspeed --num_gpus 2 pretrain_gpt.py --num-layers 3"\necho $CMD\neval $CMD',
        "run_cmd='python pretrain_gpt.py --num-layers 3'\nsrun --wait=60 sh -c \"${run_cmd}\"",
    ],
)
def test_commands_in_strings_are_found(line: str) -> None:
    launch = find_launch(line)
    assert (launch.program, launch.words) == ("pretrain_gpt.py", ["--num-layers", "3"])


def test_several_nodes_are_a_job() -> None:
    command, _ = convert("torchrun --nproc_per_node 8 --nnodes 4 p.py --num-layers 3", {})
    assert command.startswith("sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 scripts/slurm/pretrain.sbatch ")


def test_statements_are_whole() -> None:
    assert [s for s in statements('A=(1\n 2 # x\n)\nB="c\nd"\ncat <<E\nx\nE\nf \\\n g') if s] == [
        "A=(1\n 2\n)",
        'B="c\nd"',
        "f   g",
    ]


def test_a_script_without_a_command_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (("echo hello\n", "no command here starts"), ("python a.py --xyzzy 3", "--xyzzy: no such flag")):
        (tmp_path / "run.sh").write_text(text)
        with pytest.raises(SystemExit) as stopped:
            main([str(tmp_path / "run.sh")])
        assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_the_command_goes_to_stdout_and_notes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(MEGATRON)
    main([str(tmp_path / "run.sh"), "1=a"])
    out, err = capsys.readouterr()
    assert out.startswith("bash scripts/launch.sh") and all(line.startswith("# ") for line in err.splitlines())
