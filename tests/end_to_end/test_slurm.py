"""scripts/slurm/pretrain.sbatch on a real SLURM of two virtual nodes, with a stand-in program; preprocess.sbatch."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.cli import metrics, pretrain
from tests.slurm_cluster import FINAL_STATES, Job, SlurmCluster, missing, slurm_cluster

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "scripts" / "slurm" / "pretrain.sbatch"
PROGRAM = {"PYTHON": sys.executable, "PROGRAM": str(Path(__file__).with_name("rank_report.py"))}


@pytest.fixture(scope="module")
def cluster():
    if reason := missing():
        pytest.skip(reason)
    with slurm_cluster(num_nodes=2) as running:
        yield running


def submit(cluster: SlurmCluster, cwd: Path, options: list[str], flags: list[str], **env: str) -> int:
    return cluster.submit(*options, SBATCH, *flags, cwd=cwd, **{**PROGRAM, **env})


def batch_log(cwd: Path, job: Job) -> str:
    return (cwd / f"slurm-{job.id}.out").read_text()


def rank_logs(log_dir: Path, job: Job) -> list[Path]:
    return sorted((log_dir / "ranks" / str(job.id)).glob("rank-*.log"))


def reports(log_dir: Path, job: Job) -> list[dict]:
    """Return each rank's output, by rank."""
    return [json.loads(log.read_text().splitlines()[0]) for log in rank_logs(log_dir, job)]


@pytest.mark.parametrize(
    "num_nodes, tasks_per_node", [*(pytest.param(1, n, marks=pytest.mark.slow) for n in (1, 2)), (2, 2)]
)
def test_ranks_meet(cluster, tmp_path, num_nodes, tasks_per_node):
    options = [f"--nodes={num_nodes}", f"--ntasks-per-node={tasks_per_node}", "--cpus-per-task=3"]
    options += [f"--gpus-per-node={tasks_per_node}"]
    # The submitting shell's own ranks and master, which sbatch hands on, must not matter.
    stale = {"RANK": "5", "WORLD_SIZE": "64", "LOCAL_RANK": "5", "MASTER_ADDR": "no", "MASTER_PORT": "1"}
    flags = ["--log-dir", "other", "--log_dir=my run", "--lr=1e-3", "a  b"]
    job = cluster.wait(submit(cluster, tmp_path, options, flags, **stale))
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), batch_log(tmp_path, job)

    world_size = num_nodes * tasks_per_node
    ranks = reports(tmp_path / "my run", job)
    assert [r["rank"] for r in ranks] == list(range(world_size))
    for rank, report in enumerate(ranks):
        assert report["world_size"] == world_size and report["total"] == world_size * (world_size + 1) // 2
        assert report["host"] == f"node{rank // tasks_per_node}"
        assert report["local_rank"] == rank % tasks_per_node
        assert report["MASTER_ADDR"] == "node0" and report["MASTER_PORT"] == str(10000 + job.id % 20000)
        assert report["argv"] == flags
        assert report["OMP_NUM_THREADS"] == "3" and report["SLURM_CPU_BIND_TYPE"] == "none"
        assert report["TORCH_FR_DUMP_TEMP_FILE"] == f"my run/ranks/{job.id}/nccl_trace_rank_"
        # Every GPU of the node, not the rank's alone.
        assert report["CUDA_VISIBLE_DEVICES"] == ",".join(str(gpu) for gpu in range(tasks_per_node))


def test_a_failing_rank_ends_the_others_and_gives_the_job_its_exit_code(cluster, tmp_path):
    flags = ["--fail-rank", "2", "--fail-code", "7", "--hang", "--alone", "--gate", str(tmp_path / "gate")]
    job = cluster.wait(submit(cluster, tmp_path, ["--nodes=2", "--ntasks-per-node=2"], flags))
    log = batch_log(tmp_path, job)
    assert (job.state, job.exit_code) == ("FAILED", "7:0"), log
    assert "rank 2 on node1 ended first: Exited with exit code 7" in log
    assert "rank 2 fails" in log  # the end of that rank's log
    assert len(rank_logs(tmp_path / "runs", job)) == 4


def test_usr1_reaches_the_ranks_and_an_interrupted_wait_goes_on(cluster, tmp_path):
    job_id = submit(cluster, tmp_path, ["--ntasks-per-node=1"], ["--hang"])
    job = cluster.wait(job_id, {"RUNNING"})
    log = tmp_path / "runs" / "ranks" / str(job_id) / "rank-0000.log"
    cluster.poll(lambda: log.exists() and "waiting" in log.read_text(), "the rank", job_id)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job_id))
    cluster.poll(lambda: "rank 0 got USR1" in log.read_text(), "the signal", job_id)
    assert cluster.job(job_id).state == "RUNNING"
    cluster.run("scancel", str(job_id))
    job = cluster.wait(job_id)
    cluster.poll(lambda: "rank 0 got TERM" in log.read_text(), "the end of the rank")
    assert job.state == "CANCELLED"


def test_a_batch_script_without_srun_is_a_single_process(cluster, tmp_path):
    """SLURM_NTASKS and SLURM_PROCID are set there too: a program that believed them would wait for peers."""
    script = tmp_path / "plain.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} {PROGRAM['PROGRAM']}\n")
    job = cluster.wait(cluster.submit("--nodes=2", "--ntasks-per-node=2", script, cwd=tmp_path))
    report = json.loads(batch_log(tmp_path, job))
    assert job.state == "COMPLETED" and report["world_size"] == 1


def test_a_job_without_an_interpreter_fails_and_says_so(cluster, tmp_path):
    job = cluster.wait(submit(cluster, tmp_path, ["--ntasks=1"], [], PYTHON=""))
    assert (job.state, job.exit_code) == ("FAILED", "2:0")
    assert "no .venv/bin/python" in batch_log(tmp_path, job) and "quickstart.sh" in batch_log(tmp_path, job)
    job = cluster.wait(submit(cluster, tmp_path, ["--ntasks=1"], [], PYTHON="no-apptainer exec image python"))
    assert "PYTHON=no-apptainer exec image python: no command no-apptainer on " in batch_log(tmp_path, job)
    job = cluster.wait(submit(cluster, tmp_path, ["--ntasks=1"], [], PROGRAM=""))
    assert job.exit_code == "2:0" and "no pretrain_gpt.py" in batch_log(tmp_path, job)


APPTAINER = """\
#!/bin/sh
[ "$1 $2 $3 $4 $5 $6" = "exec --nv --bind /data images/torch.sif python" ] || exit 3
shift 6
IN_IMAGE=images/torch.sif exec {python} "$@"
"""


def test_containers_modules_and_options_of_srun(cluster, tmp_path):
    """SETUP puts the container's program on the path, PYTHON has several words, SRUN_ARGS comes after our options."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "apptainer").write_text(APPTAINER.format(python=sys.executable))
    (tmp_path / "tools" / "apptainer").chmod(0o755)
    # As of a module: an unset variable, a failed command and `shift` end nothing. The PATH has a file of the same name.
    (tmp_path / "env.sh").write_text(
        'echo "in $UNSET_BY_ALL"; shift; false\nexport NCCL_IB_HCA=mlx5\nPATH=$PWD/tools:$PATH\n'
    )
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "env.sh").write_text("exit 9\n")
    image = "apptainer exec --nv --bind /data images/torch.sif python"
    env = {"SETUP": "env.sh", "PYTHON": image, "SRUN_ARGS": "--job-name=inside\n--export=ALL,FROM_ARGS=1"}
    env["PATH"] = f"{tmp_path / 'path'}:{os.environ['PATH']}"
    job = cluster.wait(submit(cluster, tmp_path, ["--nodes=2", "--ntasks-per-node=2"], ["--alone", "a  b"], **env))
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), batch_log(tmp_path, job)
    ranks = reports(tmp_path / "runs", job)
    assert [(r["rank"], r["host"], r["argv"]) for r in ranks] == [
        (rank, f"node{rank // 2}", ["--alone", "a  b"]) for rank in range(4)
    ]
    wanted = {"IN_IMAGE": "images/torch.sif", "NCCL_IB_HCA": "mlx5", "FROM_ARGS": "1", "SLURM_JOB_NAME": "inside"}
    assert all({name: rank[name] for name in wanted} == wanted for rank in ranks)


def test_a_setup_that_fails_ends_the_job(cluster, tmp_path):
    (tmp_path / "env.sh").write_text("return 4\n")
    for setup, said in (("env.sh", "SETUP=env.sh ended with exit code 4"), ("gone.sh", "no SETUP=gone.sh in ")):
        job = cluster.wait(submit(cluster, tmp_path, ["--ntasks=1"], [], SETUP=setup))
        assert (job.state, job.exit_code) == ("FAILED", "2:0") and said in batch_log(tmp_path, job)


def test_the_python_of_a_container_need_not_be_on_the_host(cluster, tmp_path):
    """srun gets pyxis's option, which this SLURM does not know."""
    env = {"PYTHON": "python-of-the-image", "SRUN_ARGS": "--container-image=images/torch.sqsh"}
    job = cluster.wait(submit(cluster, tmp_path, ["--ntasks=1"], [], **env))
    log = batch_log(tmp_path, job)
    assert "--container-image=images/torch.sqsh" in log and "unrecognized option" in log and "quickstart" not in log


def test_outside_slurm_the_script_says_how_to_submit_it(tmp_path):
    env = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", SBATCH], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "sbatch --nodes=1" in done.stderr and "launch.sh" in done.stderr


@pytest.mark.slow
def test_pretrains_over_two_nodes(cluster, tmp_path, model):
    """The real program: dp 2 over two nodes, saved, resumed by one node with tp 2; the single process' curve."""
    flags = [str(flag) for flag in model] + ["--train-iters", "6", "--zero-stage", "3"]
    resume = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--log-dir", str(tmp_path / "run")]
    jobs = [
        (["--nodes=2", "--ntasks-per-node=1"], [*flags, *resume, "--exit-interval", "3"]),
        (["--nodes=1", "--ntasks-per-node=2"], [*flags, *resume, "--tensor-model-parallel-size", "2"]),
    ]
    for options, words in jobs:
        job_id = submit(cluster, tmp_path, options, words, PROGRAM=str(ROOT / "pretrain_gpt.py"), OMP_NUM_THREADS="1")
        job = cluster.wait(job_id)
        assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), batch_log(tmp_path, job)
    assert pretrain(*flags, "--log-dir", tmp_path / "alone").returncode == 0
    found, wanted = metrics(tmp_path / "run"), metrics(tmp_path / "alone")
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in wanted], rel=1e-5)
    assert [m["iteration"] for m in found] == list(range(1, 7))


@pytest.mark.slow
def test_a_refusal_reaches_the_job(cluster, tmp_path, model):
    flags = [*map(str, model), "--num-attention-heads", "7"]
    options = ["--nodes=2", "--ntasks-per-node=1"]
    job_id = submit(cluster, tmp_path, options, flags, PROGRAM=str(ROOT / "pretrain_gpt.py"))
    job = cluster.wait(job_id)
    assert (job.state, job.exit_code) == ("FAILED", "1:0"), batch_log(tmp_path, job)
    assert "--hidden-size 48 is not divisible by --num-attention-heads 7" in batch_log(tmp_path, job)


def started(cluster: SlurmCluster, job_id: int, log_dir: Path, lines: int = 4) -> None:
    """Wait until the run has trained a few iterations."""
    path = log_dir / "metrics.jsonl"
    cluster.wait(job_id, {"RUNNING"})
    cluster.poll(lambda: path.exists() and len(path.read_text().splitlines()) > lines, "training", job_id)


@pytest.mark.slow  # a minute, of which SLURM waits 11 s before it requeues
def test_a_job_near_its_limit_saves_is_requeued_and_ends_with_the_same_curve(cluster, tmp_path, model):
    """Signalled as before the time limit, over two nodes; equal to the uninterrupted run bit for bit.

    Its --save is that of a preset, which the script does not read.
    """
    flags = [*map(str, model), "--train-iters", "150", "--zero-stage", "2"]
    (tmp_path / "p.toml").write_text(f'save = "{tmp_path / "saved"}"\n')
    where = ["--preset", str(tmp_path / "p.toml"), "--log-dir", str(tmp_path / "run")]
    program = {"PROGRAM": str(ROOT / "pretrain_gpt.py"), "SETUP": str(tmp_path / "env.sh")}
    (tmp_path / "env.sh").write_text("export OMP_NUM_THREADS=1; echo sourced before srun\n")
    job_id = submit(cluster, tmp_path, ["--nodes=2", "--ntasks-per-node=1"], [*flags, *where], **program)
    started(cluster, job_id, tmp_path / "run")
    cluster.run("scancel", "--batch", "--signal=USR1", str(job_id))
    job = cluster.wait(job_id)
    log = batch_log(tmp_path, job)
    assert log.count("sourced before srun") == 2  # the second time after the requeue
    assert (job.state, job.exit_code, job.fields["Restarts"]) == ("COMPLETED", "0:0", "1"), log
    for words in ("USR1: the ranks save and stop", "exit code 75", "requeued: resumes from iter_"):
        assert words in log, log
    assert "ended first" not in log  # which rank left first is no failure
    at = int(log.split("requeued: resumes from iter_")[1][:7])
    assert 4 < at < 150
    done = pretrain(*flags, "--log-dir", tmp_path / "whole", ranks=2)
    assert done.returncode == 0, done.stderr
    found, wanted = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    assert [(m["iteration"], m["loss"], m["grad_norm"]) for m in found] == [
        (m["iteration"], m["loss"], m["grad_norm"]) for m in wanted
    ]


@pytest.mark.slow  # SLURM takes 10 s to see that a node is gone, and waits before it requeues
def test_a_node_that_fails_costs_the_work_since_the_last_save(tmp_path, model):
    """Two of three nodes train; one fails; SLURM requeues the job, which resumes with the third; the same curve."""
    if reason := missing():
        pytest.skip(reason)
    saved, run = tmp_path / "saved", tmp_path / "run"
    flags = [*map(str, model), "--train-iters", "60", "--zero-stage", "2"]
    where = ["--save", str(saved), "--log-dir", str(run), "--save-interval", "5"]
    with slurm_cluster(num_nodes=3) as cluster:
        program = {"PROGRAM": str(ROOT / "pretrain_gpt.py"), "OMP_NUM_THREADS": "1"}
        job_id = submit(cluster, tmp_path, ["--nodes=2", "--ntasks-per-node=1"], [*flags, *where], **program)
        started(cluster, job_id, run, lines=6)
        cluster.fail("node1")
        job = cluster.wait(job_id)
        log = batch_log(tmp_path, job)
        assert (job.state, job.exit_code, job.fields["Restarts"]) == ("COMPLETED", "0:0", "1"), log
        assert job.fields["NodeList"] == "node[0,2]"
    done = pretrain(*flags, "--log-dir", tmp_path / "whole", ranks=2)
    assert done.returncode == 0, done.stderr
    curves = [[(m["iteration"], m["loss"]) for m in metrics(folder)] for folder in (run, tmp_path / "whole")]
    assert curves[0] == curves[1] and len(curves[0]) == 60


@pytest.mark.slow  # SLURM takes 10 s to see that a node is gone, and waits before it requeues
def test_an_elastic_job_continues_without_a_lost_node_and_with_it_again(tmp_path, model):
    """Three nodes, then two without a requeue, then three; the same curve, and no sample twice."""
    if reason := missing():
        pytest.skip(reason)
    saved, run = tmp_path / "saved", tmp_path / "run"
    drop = model.index("--micro-batch-size")
    flags = [
        *map(str, model[:drop] + model[drop + 2 :]),
        "--train-iters",
        "1000",
        "--precision",
        "fp64",
        "--log-interval",
        "500",
    ]
    where = ["--save", str(saved), "--log-dir", str(run), "--save-interval", "5", "--elastic", "2:3"]
    options = ["--no-kill", "--nodes=3", "--ntasks-per-node=1"]
    with slurm_cluster(num_nodes=3) as cluster:
        program = {"PROGRAM": str(ROOT / "pretrain_gpt.py"), "OMP_NUM_THREADS": "1", "ELASTIC_SECONDS": "3"}
        job_id = submit(cluster, tmp_path, options, [*flags, *where], **program)
        started(cluster, job_id, run, lines=6)
        cluster.fail("node1")
        log = tmp_path / f"slurm-{job_id}.out"
        cluster.poll(lambda: "elastic: generation 1 on 2 of 3" in log.read_text(), "two nodes", job_id)
        rank_0 = run / "ranks" / str(job_id) / "rank-0000.log"
        cluster.poll(lambda: "generation 1: 2 nodes of at most 3" in rank_0.read_text(), "training on them", job_id)
        assert cluster.job(job_id).fields["Restarts"] == "0"
        cluster.come_back("node1")
        cluster.poll(lambda: "requeued: resumes from" in log.read_text(), "the return", job_id)
        job = cluster.wait(job_id)
        text = batch_log(tmp_path, job)
        # SLURM may repeat its TERM to the first step once the node is back: it reaches the new one, which saves.
        assert (job.state, job.exit_code) == ("COMPLETED", "0:0") and int(job.fields["Restarts"]) in (1, 2), text
        assert job.fields["NodeList"] == "node[0-2]"
    starts = re.findall(r"^generation (\d+): (\d) nodes", rank_0.read_text(), re.MULTILINE)
    assert starts[:2] == [("0", "3"), ("1", "2")] and {nodes for _, nodes in starts[2:]} == {"3"}, text
    done = pretrain(*flags, "--micro-batch-size", "1", "--log-dir", tmp_path / "whole")
    assert done.returncode == 0, done.stderr
    found, wanted = metrics(run), metrics(tmp_path / "whole")
    assert [(m["iteration"], m["consumed_samples"]) for m in found] == [(n, 12 * n) for n in range(1, 1001)]
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in wanted], rel=1e-10)


@pytest.mark.slow
def test_jobs_of_a_chain_follow_each_other(cluster, tmp_path, model):
    """--dependency=singleton: the second begins when the first has ended early, and resumes from its checkpoint."""
    saved, run = str(tmp_path / "saved"), tmp_path / "run"
    flags = [*map(str, model), "--train-iters", "60", "--save", saved, "--load", saved, "--log-dir", str(run)]
    options = ["--nodes=1", "--ntasks-per-node=1", "--job-name=chain", "--dependency=singleton"]
    program = {"PROGRAM": str(ROOT / "pretrain_gpt.py"), "OMP_NUM_THREADS": "1", "REQUEUE": "0"}
    first, second = (submit(cluster, tmp_path, options, flags, **program) for _ in range(2))
    started(cluster, first, run)
    assert cluster.job(second).state == "PENDING"
    cluster.run("scancel", "--batch", "--signal=USR1", str(first))
    job = cluster.wait(first)
    assert (job.state, job.exit_code) == ("FAILED", "75:0"), batch_log(tmp_path, job)
    job = cluster.wait(second)
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), batch_log(tmp_path, job)
    assert [m["iteration"] for m in metrics(run)] == list(range(1, 61))
    assert "resuming after iteration" in rank_logs(run, job)[0].read_text()


@pytest.mark.slow
def test_a_script_of_the_paper_starts_its_preset(cluster, tmp_path):
    """The program is a stand-in, on fewer ranks; flags after the script come last."""
    options = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", f"--output={tmp_path}/slurm-%j.out"]
    script = ROOT / "scripts" / "slurm" / "pretrain_100b.sbatch"
    job_id = cluster.submit(*options, script, "--log-dir", str(tmp_path / "run"), cwd=ROOT, **PROGRAM)
    job = cluster.wait(job_id)
    assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), batch_log(tmp_path, job)
    found = reports(tmp_path / "run", job)
    assert len(found) == 4 and found[0]["argv"][:2] == ["--preset", "zero-100b"]
    assert found[0]["argv"][-2:] == ["--log-dir", str(tmp_path / "run")]


@pytest.mark.slow
def test_a_cancelled_job_saves_and_is_not_requeued(cluster, tmp_path, model):
    where = ["--save", str(tmp_path / "saved"), "--log-dir", str(tmp_path / "run")]
    flags = [*map(str, model), "--train-iters", "5000", *where]
    program = {"PROGRAM": str(ROOT / "pretrain_gpt.py"), "OMP_NUM_THREADS": "1"}
    job_id = submit(cluster, tmp_path, ["--nodes=1", "--ntasks-per-node=2"], flags, **program)
    started(cluster, job_id, tmp_path / "run")
    cluster.run("scancel", str(job_id))
    job = cluster.wait(job_id)
    assert job.state == "CANCELLED"
    rank_0 = rank_logs(tmp_path / "run", job)[0]
    cluster.poll(lambda: "by SIGTERM: saved" in rank_0.read_text(), "the save")
    newest = (tmp_path / "saved" / "latest").read_text().strip()
    assert f"stopped after iteration {int(newest[5:])} by SIGTERM" in rank_0.read_text()


def test_the_end_of_a_job_is_known(cluster, tmp_path):
    """--exit-before-minutes asks SLURM; a margin as long as the limit stops before the first step."""
    ask = f"cd {ROOT} && {sys.executable} -c 'from megazero.cluster.scheduler import job_end; print(job_end())'"
    for limit, known in (("--time=30", True), ("--time=UNLIMITED", False)):
        script = tmp_path / "ask.sh"
        script.write_text(f"#!/bin/bash\n{ask}\n")
        begin = time.time()
        job = cluster.wait(cluster.submit(limit, script, cwd=tmp_path))
        found = batch_log(tmp_path, job).strip().splitlines()[-1]
        assert (abs(float(found) - begin - 1800) < 60) if known else found == "None"


# Stands in for PYTHON: small chunks, each committed; the first run of part 1 is killed behind its second commit.
KILLED_ONCE = """\
#!{python}
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from data_tools import journal, preprocess_data, reading

reading.CHUNK_BYTES, preprocess_data.COMMIT_BYTES = 2000, 2000
marker, commit, commits = Path({marker!r}), journal.WorkFolder.commit, []

def commit_and_die(self, state):
    commit(self, state)
    commits.append(state)
    if len(commits) == 2 and os.environ["SLURM_ARRAY_TASK_ID"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

journal.WorkFolder.commit = commit_and_die
preprocess_data.main(sys.argv[2:])
"""


def states(cluster: SlurmCluster, job_id: int) -> dict[str, str]:
    """Array task -> its state."""
    lines = cluster.run("scontrol", "-o", "show", "job", str(job_id)).splitlines()
    found = (dict(re.findall(r"(?<!\S)(\w+)=(\S*)", line)) for line in lines if line)
    return {fields["ArrayTaskId"]: fields["JobState"] for fields in found}


@pytest.mark.slow
def test_an_array_preprocesses_and_a_killed_task_goes_on(cluster, tmp_path):
    """Three parts on two nodes; the killed task is submitted again, and continues; joined, they are the whole."""
    python, text = tmp_path / "python", tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{k} " + "word " * (k % 97)}) + "\n" for k in range(900)))
    python.write_text(KILLED_ONCE.format(python=sys.executable, marker=str(tmp_path / "killed")))
    python.chmod(0o755)
    flags = ["--input", str(text), "--output-prefix", str(tmp_path / "p"), "--tokenizer", "byte", "--append-eod"]
    script = ROOT / "scripts" / "slurm" / "preprocess.sbatch"

    def run(array: str, wanted: dict[str, str], **env: str) -> None:
        options = [f"--array={array}", "--ntasks=1", "--cpus-per-task=1", f"--output={tmp_path}/%a.log"]
        job = cluster.submit(*options, script, *flags, cwd=ROOT, PYTHON=str(python), **env)
        cluster.poll(lambda: set(states(cluster, job).values()) <= FINAL_STATES, "the array")
        logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
        assert states(cluster, job) == wanted, logs

    run("0-2", {"0": "COMPLETED", "1": "FAILED", "2": "COMPLETED"})
    assert (tmp_path / "p-00001-of-00003.partial").exists()
    assert not (tmp_path / "p-00001-of-00003_text_document.idx").exists()
    run("1", {"1": "COMPLETED"}, PARTS="3")
    assert "resuming after" in (tmp_path / "1.log").read_text()
    parts = sorted(map(str, tmp_path.glob("p-*_text_document.idx")))
    tools = (
        ["merge_datasets", "--input", *parts, "--output-prefix", str(tmp_path / "joined")],
        ["preprocess_data", *flags, "--workers", "1"],
    )
    for name, *arguments in tools:
        command = [sys.executable, f"data_tools/{name}.py", *arguments]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"joined{end}").read_bytes() == (tmp_path / f"p_text_document{end}").read_bytes()
