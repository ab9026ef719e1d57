"""The command in several processes: what is refused, how they are started and watched, and that they say one thing.

One test of each kind starts processes from the shell; others fork ranks, as torchrun would start them, which have all
libraries in memory already.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import Ran, command, refused
from conftest import SAMPLES
from rank_cases import spread
from task_cases import CASES, open_case

from headscope import launching, ranks
from headscope.cli import _run
from headscope.cli.settings import Settings
from headscope.cli.talk import Lines, Pace
from headscope.errors import RankError, UsageError
from headscope.interrupt import Interrupted, Terminated
from headscope.launching import Standing, standing
from headscope.study import Study

VIT = SAMPLES / "vit-digits"
DATA = ("--data", VIT / "test.csv")
Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return command(monkeypatch, capsysbinary)


def test_where_a_process_stands_is_read_from_the_environment() -> None:
    place = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert standing({}) == Standing(0, 1, 0)
    assert standing({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"} | place) == Standing(3, 4, 1)
    for wrong in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "2"} | place, {"WORLD_SIZE": "two", "RANK": "0"}):
        with pytest.raises(UsageError):
            standing(wrong)


@pytest.mark.parametrize("words", [("inspect", VIT), ("prune", VIT, "--ratio", "0.3")])
def test_rank_0_alone_needs_the_folder_of_the_report(
    words: tuple[object, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other machines may have none; there, what follows is the check of the model."""

    def reached(given: Settings) -> None:
        raise LookupError("went on")

    monkeypatch.setattr(Settings, "check_model", reached)
    asked = (*words, *DATA, "-o", tmp_path / "absent" / "out.csv")
    assert "absent" in run(*asked).err
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LookupError, match="went on"):
        run(*asked)


def test_what_cannot_be_shared_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    pruning, anything = (
        ("prune", VIT, "--ratio", "0.3", "-o", tmp_path / "out"),
        "pruning by anything but a measure on --data",
    )
    assert refused(run(*pruning, "--processes", "2"), 2, f"{anything} is not shared out", "leave out --processes")
    assert refused(run(*pruning, *DATA, "--criterion", "gates", "--work", work), 2, anything)
    assert refused(run("prune", VIT, *DATA, "--heads", "0:1", "-o", tmp_path / "out", "--work", work), 2, anything)
    assert refused(run(*pruning[:4], *DATA, "--curve", tmp_path / "c.csv", "--work", work), 2, anything)
    ablation = ("inspect", VIT, *DATA, "--limit", "20", "--measures", "ablation", "--budget", "14", "--work", work)
    assert refused(run(*ablation), 2, "--budget 14 draws from all examples as it goes", "exact ablation")
    assert refused(run("evaluate", VIT, *DATA, "--timeout", "9"), 2, "--timeout is about several processes")
    assert refused(run("inspect", VIT, "--processes", "2"), 2, "without a pass over --data")
    assert refused(run("inspect", VIT, *DATA, "--check", "--work", work), 2, "without a pass over --data")
    assert refused(run("similarity", VIT, "--processes", "2"), 2, "a comparison of weights")
    assert refused(run("inspect", VIT, *DATA, "--timeout", "9"), 2, "--timeout is about several processes")
    assert refused(run("inspect", VIT, *DATA, "--resume", "never"), 2, "--work DIR keeps it")
    assert refused(run("inspect", VIT, *DATA, "--resume", "always"), 2, "no such choice")
    assert refused(run("inspect", VIT, "--data", "-", "--processes", "2"), 2, "by one process only")
    assert refused(run(*pruning, *DATA, "--eval-data", "-", "--processes", "2"), 2, "by one process only")
    assert refused(run("inspect", VIT, *DATA, "--processes", "0"), 2, "--processes 0")
    assert refused(run("inspect", VIT, *DATA, "--processes", "2", "--timeout", "0"), 2, "--timeout 0")
    assert refused(run("inspect", VIT, *DATA, "--work", VIT / "config.json"), 2, "is a file, not a folder")
    assert refused(run("inspect", VIT, *DATA, "--work", tmp_path / "a" / "b"), 1, "does not exist")
    model = shutil.copytree(VIT, tmp_path / "model")
    assert refused(run("inspect", model, *DATA, "--work", f"{model}/."), 2, "is the folder of a model")
    both = ("prune", VIT, *DATA, "--ratio", "0.3", "-o", tmp_path / "out", "--work", tmp_path / "out")
    assert refused(run(*both), 2, "is the folder of a model")
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert refused(run("inspect", VIT, *DATA, "--processes", "2"), 2, "WORLD_SIZE promises 3")
    assert refused(run("prune", VIT, "--ratio", "0.3", "--dry-run"), 2, "promises 3 processes")
    monkeypatch.setenv("RANK", "1")
    dry = ["evaluate", VIT, *DATA, "--dry-run"]
    for words in (["prune", VIT, "--ratio", "0.3", "--dry-run"], ["inspect", VIT, "--by", "model"], dry):
        ran = run(*words)
        assert (ran.out, ran.err) == ("", ""), "rank 0 speaks for all"


def test_a_metric_that_does_not_fit_is_refused_before_anything_is_scored(run: Run, tmp_path: Path) -> None:
    words = ("prune", VIT, *DATA, "--limit", "8", "--criterion", "importance", "--metric", "perplexity")
    kept = ("--ratio", "0.3", "-o", tmp_path / "out", "--work", tmp_path / "work")
    assert refused(run(*words, *kept), 2, "metric perplexity does not fit image-classification")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(("stop", "code", "word"), [(Interrupted, 130, "interrupted"), (Terminated, 143, "terminated")])
def test_a_run_that_is_stopped_says_how_it_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException], code: int, word: str
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise stop

    monkeypatch.setattr(Study, "scores", stopped)
    monkeypatch.setattr(launching, "start", stopped)
    words, work = ("inspect", VIT, *DATA, "--limit", "4"), tmp_path / "work"
    for more in ((), ("--processes", "2")):
        ran = run(*words, "--work", work, *more)
        hint = f"hint: the same command goes on from the finished units in {work}"
        assert (ran.code, ran.out, ran.err) == (code, "", f"error: {word}\n{hint}\n")
    ran = run(*words)
    assert (ran.code, ran.out, ran.err) == (code, "", f"error: {word}\n"), "nothing was kept"


def _children(*programs: str) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-S", "-c", program]) for program in programs]


SLEEP = "import time; time.sleep(60)"


def test_ranks_that_end_well_end_the_run() -> None:
    assert launching.watch(_children("", "import time; time.sleep(0.2)"), hint="") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_b110_a_killed_rank_ends_the_others_and_is_named(rank: int) -> None:
    kill = "import os; os.kill(os.getpid(), 9)"
    children = _children(*(kill if number == rank else SLEEP for number in range(3)))
    begin = time.monotonic()
    with pytest.raises(RankError, match=f"rank {rank} was killed by SIGKILL") as caught:
        launching.watch(children, hint="again")
    assert time.monotonic() - begin < 20 and caught.value.hint == "again"
    assert all(child.returncode is not None for child in children)


def test_rank_0_tells_the_errors_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = "import sys, time; time.sleep(0.3); sys.exit(3)"
    assert launching.watch(_children(wait, "import sys; sys.exit(1)"), hint="") == 3
    monkeypatch.setattr(launching, "OTHERS", 1.0)
    failing = "import sys, time; time.sleep(0.5); sys.exit(1)"
    for code in (3, launching.TERMINATED):
        asked = f"import signal, sys; signal.signal(15, lambda *_: sys.exit({code})); {SLEEP}"
        if code == 3:
            assert launching.watch(_children(asked, failing), hint="") == 3, "told when it was asked to end"
            continue
        with pytest.raises(RankError, match="rank 1 failed with exit code 1"):
            launching.watch(_children(asked, failing), hint="")


def test_ranks_start_anew_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun tells its own process, which holds no store, is not for those that it starts."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    asks = "import os, sys; sys.exit(os.environ['TORCHELASTIC_USE_AGENT_STORE'] == 'True')"
    assert launching.watch(launching.start([sys.executable, "-S", "-c", asks], 2), hint="") == 0


def test_ranks_import_nothing_that_their_command_would_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`headscope` does not look for modules where it is started, as `python -m headscope` does."""
    (tmp_path / "typer.py").write_text("raise SystemExit('the user has a typer of his own')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["headscope", "--version"])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    ran = subprocess.run(launching.this_command(), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout.startswith("headscope ")
    sys.path.insert(0, str(tmp_path))
    ran = subprocess.run(launching.this_command(), capture_output=True, text=True, timeout=60)
    assert "a typer of his own" in ran.stderr


NOISE = """
from headscope.cli import _prepare
_prepare()
import datetime
from torch.distributed import TCPStore
try:
    TCPStore("127.0.0.1", 1, 2, False, datetime.timedelta(seconds=1))
except RuntimeError as error:
    print("told")
"""


def test_what_ranks_lose_is_told_in_a_line_without_backtraces() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    ran = subprocess.run([sys.executable, "-c", NOISE], capture_output=True, text=True, timeout=120, env=environment)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "told\n", "")


def test_a_line_a_minute_tells_rate_and_time_left() -> None:
    now, said = [0.0], list[str]()
    lines = Lines(said.append, lambda: now[0])
    for done in range(10, 400, 10):
        now[0] += 4.0
        lines(done, 400)
    assert said[0] == "150 of 400 examples, 2.5 a second, 1:40 left" and len(said) == 2
    pace = Pace(lambda: now[0])
    assert pace.of(5) is None
    now[0] += 2
    assert pace.of(9) == 2.0
    assert pace.of(3) is None, "another pass"


def _rows(folder: Path) -> tuple[str, ...]:
    case = CASES["single"]
    open_case(replace(case, rows=case.rows * 2), folder)
    return (str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--batch-size", "1", "--dtype", "float32")


WATCHED = """
import runpy, sys
from headscope import launching

def start(command, count):
    print(command[3:], count, *sorted({"torch", "transformers", "pandas"} & sys.modules.keys()))
    sys.exit()

launching.start, sys.argv = start, ["headscope", *sys.argv[1:]]
runpy.run_module("headscope", run_name="__main__")
"""


@pytest.mark.parametrize("command_of", ["inspect", "similarity", "evaluate", "prune"])
def test_the_process_that_only_watches_imports_no_torch(command_of: str, tmp_path: Path) -> None:
    more = {
        "inspect": ("--measures", "importance", "--columns", "head,importance"),
        "prune": ("--ratio", "0.3", "-o", str(tmp_path / "out")),
    }
    words = [command_of, str(VIT), *map(str, DATA), "--processes", "3", *more.get(command_of, ())]
    ran = subprocess.run([sys.executable, "-c", WATCHED, *words], capture_output=True, text=True, timeout=120)
    assert (ran.stdout, ran.stderr) == (f"{words} 3\n", "")
    wrong = [*words[:1], str(tmp_path), *words[2:]]
    ran = subprocess.run([sys.executable, "-c", WATCHED, *wrong], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "" and "no config.json" in ran.stderr, "and starts nothing for what is no model"


def _begin(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    settings = os.environ | {"OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", *(launcher or ("headscope",)), *words]
    return subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings)


def _in_ranks(*words: object, folder: Path) -> Sequence[Ran]:
    """The command in two forked ranks, by the environment that a launcher gives them."""

    def told(place: Standing) -> Ran:
        ranks.SILENCE = 60.0  # none is to die
        out, err = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
        sys.argv, sys.stdout, sys.stderr = ["headscope", *map(str, words)], out, err
        code = _run()
        return Ran(code, out.buffer.getvalue().decode(), err.getvalue())

    ended = spread(2, told, folder, patience=60.0, limit=240.0)
    assert [one.error for one in ended] == ["", ""]
    return [one.given for one in ended]


def test_two_processes_write_the_bytes_of_one(run: Run, tmp_path: Path) -> None:
    words = ("inspect", *_rows(tmp_path), "--measures", "importance,attention,ablation,only")
    process = _begin(*words, "--processes", "2", "--work", str(tmp_path / "work"))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert err.count("14 examples") == 1, "rank 0 alone speaks"
    assert out == run(*words).out
    assert len(list((tmp_path / "work").iterdir())) == 8, "passes with gated heads, and the one for the other measures"


def test_two_processes_evaluate_as_one_and_rank_0_times_alone(run: Run, tmp_path: Path) -> None:
    place, *rest = _rows(tmp_path)
    words, kept = ("evaluate", place, place, *rest), tmp_path / "work"
    timed = ("--speed", "--speed-batches", "1", "--tokens", "8", "--columns", "model,loss,metric,divergence,latency_ms")
    first, second = _in_ranks(*words, *timed, "--work", kept, folder=tmp_path)
    assert first.code == second.code == 0, first.err + second.err
    assert first.err.count("95 % intervals") == 1 and (second.out, second.err) == ("", ""), "rank 0 alone speaks"
    assert first.err.count("timed by rank 0 alone, after all others had ended, threads: 1") == 1
    alone = run(*words, "--columns", "model,loss,metric,divergence")
    assert [line.rpartition(",")[0] for line in first.out.splitlines()] == alone.out.splitlines()
    assert all(float(line.rpartition(",")[2]) > 0 for line in first.out.splitlines()[1:])
    done = {path: path.stat().st_mtime_ns for path in sorted(kept.iterdir())}
    (last := list(done)[-1]).unlink()
    assert run(*words, "--work", kept).out == run(*words).out
    assert [path for path in done if path.stat().st_mtime_ns != done[path]] == [last] and len(done) == 4


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("in_process")
def test_two_processes_write_the_checkpoint_of_one(run: Run, tmp_path: Path) -> None:
    words, kept = (
        ("prune", *_rows(tmp_path), "--ratio", "0.3", "--rounds", "2", "--criterion", "ablation"),
        tmp_path / "work",
    )
    one = run(*words, "-o", tmp_path / "one")
    assert one.code == 0, one.err
    first, second = _in_ranks(*words, "-o", tmp_path / "two", "--work", kept, folder=tmp_path)
    assert first.code == second.code == 0, first.err + second.err
    assert first.out == one.out and _files(tmp_path / "two") == _files(tmp_path / "one")
    assert first.err.count("heads") == one.err.count("heads") and not second.out + second.err, "rank 0 alone speaks"
    done = {path: path.stat().st_mtime_ns for path in sorted(kept.iterdir())}
    (last := list(done)[-1]).unlink()
    assert run(*words, "-o", tmp_path / "three", "--work", kept).out == one.out
    assert [path for path in done if path.stat().st_mtime_ns != done[path]] == [last]
    assert {path.name[:6] for path in done} == {"pass-1", "pass-2"}, "of later rounds, nothing"
    assert _files(tmp_path / "three") == _files(tmp_path / "one")
    changed = run(*words[:-1], "effect", "-o", tmp_path / "four", "--work", kept)
    assert refused(changed, 1, "holds units of another run: measures is")


@pytest.mark.slow
def test_a_limit_that_cannot_be_kept_ends_all_with_its_code(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    words = ("prune", *_rows(tmp_path), "--target-parameters", "1", "--criterion", "importance", "-o", target)
    process = _begin(*words, "--processes", "2")
    begin = time.monotonic()
    _, err = process.communicate(timeout=240)
    assert process.returncode == 3 and time.monotonic() - begin < 120
    assert err.count("error:") == 1 and "--target-parameters 1 cannot be met" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command_of", ["inspect", "similarity"])
@pytest.mark.parametrize(
    "launcher",
    [
        ("torch.distributed.run", "--nproc-per-node", "2", "-m", "headscope"),
        ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m", "headscope"),
    ],
    ids=["torchrun", "accelerate"],
)
def test_launchers_give_the_bytes_of_one_process(
    run: Run, tmp_path: Path, launcher: tuple[str, ...], command_of: str
) -> None:
    words = (command_of, *_rows(tmp_path))
    process = _begin(*words, launcher=launcher)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert out == run(*words).out


@pytest.mark.slow
def test_b110_the_command_says_which_rank_was_killed_and_goes_on(run: Run, tmp_path: Path) -> None:
    words = ("inspect", *_rows(tmp_path), "--measures", "importance,attention")
    kept, target = tmp_path / "work", tmp_path / "out.csv"
    process = _begin(*words, "--processes", "2", "--work", str(kept), "-o", str(target))
    until = time.monotonic() + 200
    while time.monotonic() < until and len(list(kept.glob("*.safetensors"))) < 2:
        time.sleep(0.001)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(ranks[1]), signal.SIGKILL)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - begin < 30
    assert "error: rank 1 was killed by SIGKILL\nhint: the same command goes on" in err
    assert not target.exists()
    assert run(*words, "--work", kept).out == run(*words).out


@pytest.mark.slow  # `.ci/run` asks for it by name
def test_the_script_for_gpus_runs_on_a_cpu_in_a_reduced_form(tmp_path: Path) -> None:
    script = Path(__file__).parent / "gpu" / "run.sh"
    ran = subprocess.run([script, "--device", "cpu"], env=os.environ | {"OUT": str(tmp_path)}, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["failures"] == [] and found["proof"]["passed"]
    gaps = found["agreement"]["vit-digits"]["float32"]
    assert len(gaps) > 25 and 0 < gaps["importance"] < 1e-4
    assert found["speed"]["inspect sentiment-minilm, cpu"]["examples_per_second"] > 0
