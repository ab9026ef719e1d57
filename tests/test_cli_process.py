"""The command as a process: imports, pipes, signals, terminals, locales."""

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from checkpoints import bert, command, pickled
from conftest import SAMPLES
from tiny_tokenizers import SIZE, tokenizer

LLAMA = SAMPLES / "llama-gqa-web"
FORBID = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'pandas', 'transformers', 'numpy'):
            raise RuntimeError('imported ' + name)
sys.meta_path.insert(0, Forbid())
"""


def start(*words, python=(), **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    command = [sys.executable, *python, "-m", "headscope", *map(str, words)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(command, env=environment, **streams)


def finish(process):
    out, err = process.communicate(timeout=60)
    assert b"Traceback" not in err
    return process.returncode, out, err


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["inspect", "--help"],
        ["inspect", LLAMA, "--by", "model"],
        ["inspect", LLAMA, "--by", "layer"],
        ["inspct", "x"],
        ["inspect", "x", "--fromat", "csv"],
        ["inspect", "x", "--batch-size", "0"],
        ["inspect", "x", "--format", "xml"],
        ["inspect", "x", "--limit", "0"],
        ["inspect", "x", "--measures", "y"],
        ["inspect", "x", "--dtype", "float17"],
        ["inspect", "a/b/c"],
        ["inspect", "./none"],
    ],
    ids=lambda words: "-".join(map(str, words[:3]))[-30:],
)
def test_what_needs_no_torch_imports_none_and_is_quick(words, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FORBID)
    begin = time.monotonic()
    code, out, err = finish(start(*words, env={"PYTHONPATH": str(tmp_path)}))
    assert time.monotonic() - begin < 2
    wrong = words[0] == "inspct" or words[-1] == "./none" or words[1:2] in (["x"], ["a/b/c"])
    assert (code, bool(out), bool(err)) == (2 - (words[-1] == "./none") if wrong else 0, not wrong, wrong)


def test_the_script_and_the_module_are_one_command():
    script = [sys.executable, "-c", "from headscope.cli import main; main()", "inspect", LLAMA, "--by", "model"]
    ours = subprocess.run(script, capture_output=True, check=True)
    assert ours.stdout == finish(start("inspect", LLAMA, "--by", "model"))[1]


def test_a_reader_that_leaves_early_is_no_fault():
    for words in (["inspect", LLAMA, "--by", "layer"], ["--help"], ["inspect", "--help"]):
        read, write = os.pipe()
        os.close(read)
        process = start(*words, stdout=write)
        os.close(write)
        code, _, err = finish(process)
        assert (code in (1, 141), err) == (True, b"")
    line = f"set -o pipefail; {sys.executable} -m headscope inspect {LLAMA} --by layer --format csv | head -1"
    piped = subprocess.run(["bash", "-c", line], capture_output=True, timeout=30)
    assert (piped.stdout[:11], piped.stderr) == (b"site,stack,", b"")


def test_a_full_disk_is_said():
    for words in (["inspect", LLAMA, "--by", "layer"], ["--version"]):
        with open("/dev/full", "wb") as full:
            code, _, err = finish(start(*words, stdout=full))
        assert (code, err) == (1, b"error: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}])
def test_no_terminal_sequences_where_they_are_unwanted(env):
    out, err = pty.openpty(), pty.openpty()
    environment = {"COLUMNS": "200", "TERM": "xterm-256color"} | env
    process = start("inspect", LLAMA, "--by", "layer", stdout=out[1], stderr=err[1], env=environment)
    seen = b""
    assert process.wait(timeout=30) == 0
    os.close(out[1])
    os.close(err[1])
    for stream, _ in (out, err):
        try:
            seen += os.read(stream, 100_000)
        except OSError:  # nothing was written
            continue
        finally:
            os.close(stream)
    assert b"decoder.causal.3" in seen and b"site,stack" not in seen  # a table, since it is a terminal
    assert b"\x1b" not in seen


def test_a_locale_without_letters(tmp_path):
    folder = bert(tmp_path / "mödèl-日本")
    environment = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    code, out, err = finish(start("inspect", folder, "--by", "model", env=environment))
    assert (code, err) == (0, b"")
    assert "mödèl-日本" in out.decode()
    code, out, err = finish(start("inspect", folder, "--by", "model", env=environment | {"PYTHONUTF8": "0"}))
    assert (code, err) == (0, b"")
    assert out.isascii() and b"m\\udcc3\\udcb6d" in out  # the name reached the program as bytes
    code, out, err = finish(start("inspect", f"{folder}x", env=environment))
    assert (code, out, err.count(b"\n")) == (1, b"", 2)


def test_data_goes_to_stdout_and_talk_to_stderr(tmp_path):
    folder = pickled(bert(tmp_path), keep=True)
    code, out, err = finish(start("inspect", folder, "--by", "layer"))
    assert (code, out.count(b"\n")) == (0, 3)
    assert out.startswith(b"site,stack,")
    assert err == b"note: pytorch_model.bin is ignored: the safetensors beside it are used\n"
    assert finish(start("inspect", folder, "--by", "layer", "-q")) == (0, out, b"")


@pytest.mark.parametrize(("number", "code", "line"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_signals(number, code, line, tmp_path):
    output = tmp_path / "out.csv"
    read, write = os.pipe()
    words = ["inspect", SAMPLES / "sentiment-minilm", "--data", "-", "-o", output]
    process = start(*words, stdin=read)
    os.close(read)
    time.sleep(2 if number == "SIGINT" else 6)  # while libraries are imported; while standard input is awaited
    process.send_signal(getattr(signal, number))
    found, out, err = finish(process)
    os.close(write)
    assert (found, out, err) == (code, b"", f"error: {line}\n".encode())
    assert list(tmp_path.iterdir()) == []


def test_what_compiled_libraries_print_is_not_shown(tmp_path, monkeypatch, capfdbinary):
    """A tokenizer may have options that its library does not know, which it prints to stdout as they are.

    Past Python, so that only what arrives at the descriptors tells.
    """
    folder = bert(tmp_path / "model", vocab_size=SIZE)
    tokenizer("bert").save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    extra = {"0": {"content": "[PAD]", "special": True, "evil\x1b]0;title\x07": True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": extra}))
    (tmp_path / "data.txt").write_text("w1 w2\n")
    ran = command(monkeypatch, capfdbinary)("inspect", folder, "--data", tmp_path / "data.txt", "--dry-run")
    assert (ran.code, ran.err) == (0, "") and ran.out.startswith("item,value,unit\n")
    assert "\x1b" not in ran.out and "evil" not in ran.out


def test_a_bug_is_one_line_too() -> None:
    """What nobody foresaw, raised inside a command in a process of its own: a line that says so, and no traceback."""
    script = (
        "import sys, headscope.survey, headscope.cli\n"
        "def broken(*_, **__): raise ValueError('boom')\n"
        "headscope.survey.survey = broken\n"
        f"sys.argv = ['headscope', 'inspect', {str(LLAMA)!r}, '--by', 'model']\n"
        "headscope.cli.main()\n"
    )
    for debug, traceback in (("", False), ("1", True)):
        environment = os.environ | {"HEADSCOPE_DEBUG": debug}
        ended = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 1
        assert ("Traceback" in ended.stderr) is traceback, ended.stderr
        assert traceback or ended.stderr.startswith("error: headscope failed unexpectedly: ValueError: boom")


SIGNALLED = """
import os, signal, sys, time
import headscope.reports._cells
from headscope import cli
from headscope.interrupt import raise_interrupts
def run(*words, **options):
    {body}
cli.app = run
cli.main()
"""


@pytest.mark.parametrize("kind", ["INT", "TERM"])
@pytest.mark.parametrize(
    "body",
    [
        "import slow",  # it would swallow what is raised in it
        'raise_interrupts(); exec("os.kill(os.getpid(), signal.SIG{kind})")',  # as a dataclass is made
        "raise_interrupts(); import slow; time.sleep(1)",
    ],
    ids=["import", "exec", "import once there is something to undo"],
)
def test_signals_while_libraries_are_imported(kind, body, tmp_path):
    slow = f"import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIG{kind})\n    time.sleep(0.2)"
    (tmp_path / "slow.py").write_text(f"{slow}\nexcept BaseException:\n    pass\n")
    program = SIGNALLED.format(body=body.format(kind=kind))
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, cwd=tmp_path)
    code, word = (130, "interrupted") if kind == "INT" else (143, "terminated")
    assert (process.returncode, process.stdout, process.stderr) == (code, b"", f"error: {word}\n".encode())
