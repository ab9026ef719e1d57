"""Folders that are whole or absent: killed, interrupted, out of room, raced, or aimed where they must not go."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headscope.errors import OutputError, ProofFailed, UsageError
from headscope.folder_writing import check_target, new_folder

SIZES = {"config.json": 700, "model-1.safetensors": 90_000, "model-2.safetensors": 60_001, "1_Pooling/config.json": 200}


class Terminated(BaseException):
    """What the command line makes of SIGTERM."""


def fill(folder: Path, version: int) -> None:
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(bytes([version]) * size)


def write(target: Path, version: int, *, force: bool = False, pause: float = 0) -> None:
    with new_folder(target, force=force) as folder:
        fill(folder, version)
        time.sleep(pause)


def version_of(folder: Path) -> int | None:
    """The version that stands there, whole; None where nothing does."""
    if not os.path.lexists(folder):
        return None
    version = (folder / "config.json").read_bytes()[0]
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert found == {name: bytes([version]) * size for name, size in SIZES.items()}
    return version


def hidden(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir() if path.name.startswith("."))


def refusal(kind: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- kills; these run in a process of their own, which imports no torch and may fork


def child(body: Callable[[], None]) -> int:
    """Start `body` in a forked process and wait until it begins; it ends with 0, 1 if interrupted, 2 if refused, 3."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)
        return pid
    code = 3
    try:
        os.write(writing, b"!")
        body()
        code = 0
    except (Terminated, KeyboardInterrupt):
        code = 1
    except (OutputError, UsageError):
        code = 2
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """How it ended: an exit status, or a negative signal number."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at_random(parent: Path, kills: int, *, force: bool) -> None:
    """Kill a process that writes one folder after the other; each is then absent or whole, or is after a restart."""
    chance, target, seen = random.Random(0), parent / "out", set()
    for kill in range(kills):
        shutil.rmtree(target, ignore_errors=True)
        if force:
            write(target, 1)
        targets = [target] * 20 if force else [parent / f"out-{kill}-{number}" for number in range(20)]

        def writes(targets: list[Path] = targets) -> None:
            for number, path in enumerate(targets):
                write(path, 2 + number, force=force)

        pid = child(writes)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) in (-signal.SIGKILL, 0)
        versions = [version_of(path) for path in targets]
        seen |= set(versions)
        if force:
            with contextlib.suppress(UsageError):
                check_target(target, None, force=False)
            assert version_of(target) is not None
        else:
            written = sum(version is not None for version in versions)
            assert versions == [2 + number for number in range(written)] + [None] * (20 - written)
            write(targets[min(written, 19)], 9, force=True)
            for path in targets[: written + 1]:
                shutil.rmtree(path, ignore_errors=True)
    if force:
        write(target, 9, force=True)
    assert hidden(parent) == []
    assert len(seen) > 3, "the kills came too early or too late"


STEPS = ("mkdir", "open", "rename", "fsync", "fchmod", "unlink", "rmdir", "close")


@contextlib.contextmanager
def dying(step: int) -> Iterator[None]:
    """In this block the process kills itself right before its `step`-th call into the file system."""
    left, originals = [step], {name: getattr(os, name) for name in STEPS}

    def counted(name: str) -> Callable:
        def call(*args: object, **options: object) -> object:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return originals[name](*args, **options)

        return call

    for name in STEPS:
        setattr(os, name, counted(name))
    yield
    for name in STEPS:
        setattr(os, name, originals[name])


def kill_at_every_step(parent: Path, *, force: bool) -> None:
    target = parent / "out"
    for step in range(1, 1000):
        shutil.rmtree(target, ignore_errors=True)
        if force:
            write(target, 1)

        def dies(step: int = step) -> None:
            with dying(step):
                write(target, 2, force=force)

        code = ended(child(dies))
        assert code in (0, -signal.SIGKILL)
        found = version_of(target)
        if force:
            with contextlib.suppress(UsageError):
                check_target(target, None, force=False)
            assert version_of(target) == (found or 1)
            assert version_of(target) in (1, 2)
            write(target, 3, force=True)
        else:
            assert found in (None, 2)
            write(target, 3, force=bool(found))
        assert version_of(target) == 3 and hidden(parent) == []
        if code == 0:
            assert step > 20
            return
    raise AssertionError("it never ended")


def interrupt_at_random(parent: Path, times: int) -> None:
    """SIGTERM and SIGINT leave no hidden folder, and the target as it was or whole."""

    def terminate(*_: object) -> None:
        raise Terminated

    chance, target, codes = random.Random(1), parent / "out", []
    signal.signal(signal.SIGTERM, terminate)
    for number in range(times):
        write(target, 1, force=True)

        def writes() -> None:
            for version in range(2, 250):
                write(target, version, force=True)

        pid = child(writes)
        time.sleep(chance.uniform(0.003, 0.03))
        os.kill(pid, signal.SIGTERM if number % 2 else signal.SIGINT)
        codes.append(ended(pid))
        assert version_of(target) in range(1, 250)
        assert hidden(parent) == []
    assert codes.count(1) > times / 2, codes


def race(parent: Path, rounds: int, *, force: bool) -> None:
    """Of processes that write one folder at once at least one wins, others are refused, and it is never a mixture."""
    codes: list[int] = []
    for number in range(rounds):
        target = parent / f"out-{number}"
        if force:
            write(target, 1)

        def writes(version: int, target: Path = target) -> None:
            write(target, version, force=force, pause=0.005)

        pids = [child(lambda version=version: writes(version)) for version in (2, 3, 4)]
        ends = [ended(pid) for pid in pids]
        assert set(ends) <= {0, 2} and ends.count(0) >= 1 and (force or ends.count(0) == 1), ends
        found = version_of(target)
        assert found in [version for version, end in zip((2, 3, 4), ends, strict=True) if end == 0]
        assert hidden(parent) == []
        codes += ends
    assert codes.count(2) > rounds / 4, codes


def alone(call: str, folder: Path) -> None:
    """Run one of the functions above in a process that has imported no torch."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    lines = [
        f"import sys; sys.path[:0] = {paths!r}",
        "from pathlib import Path; import test_folder_writing as t",
        f"t.{call.replace('(', f'(Path({str(folder)!r}), ', 1)}",
        "assert 'torch' not in sys.modules",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.fixture
def quick_disk(tmp_path):
    """A folder in memory where there is one: a kill of the process is the same there, and flushing takes no time."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("force", [False, True])
def test_killed_at_random_moments(quick_disk, force):
    alone(f"kill_at_random(50, force={force})", quick_disk)


@pytest.mark.parametrize("force", [False, True])
def test_killed_at_every_step(quick_disk, force):
    alone(f"kill_at_every_step(force={force})", quick_disk)


def test_interrupted_at_random_moments(quick_disk):
    alone("interrupt_at_random(30)", quick_disk)


@pytest.mark.parametrize("force", [False, True])
def test_several_runs_at_once(quick_disk, force):
    alone(f"race(20, force={force})", quick_disk)


# -- within one process


def test_a_new_folder(tmp_path):
    target = tmp_path / "out"
    with new_folder(target) as folder:
        assert folder.parent == tmp_path and folder.name.startswith(f".out.headscope-{os.getpid()}-")
        assert list(folder.iterdir()) == []
        fill(folder, 1)
        assert not target.exists()
    assert version_of(target) == 1 and hidden(tmp_path) == []


def test_an_old_folder_stands_until_the_new_one_is_proved(tmp_path):
    target = tmp_path / "out"
    write(target, 1)
    (target / "extra").write_text("goes with the old folder")
    with new_folder(target, force=True) as folder:
        fill(folder, 2)
        assert (target / "config.json").read_bytes()[0] == 1 and (target / "extra").exists()
    assert version_of(target) == 2 and hidden(tmp_path) == []


@pytest.mark.parametrize(
    "error", [ProofFailed("no"), KeyboardInterrupt(), SystemExit(1), Terminated(), KeyError("bug")]
)
@pytest.mark.parametrize("force", [False, True])
def test_any_exception_leaves_things_as_they_were(tmp_path, error, force):
    target = tmp_path / "out"
    if force:
        write(target, 1)
    with pytest.raises(type(error)) as caught, new_folder(target, force=force) as folder:
        fill(folder, 2)
        raise error
    assert caught.value is error
    assert version_of(target) == (1 if force else None) and hidden(tmp_path) == []


def test_no_error_of_the_caller_is_taken_for_one_of_the_disk(tmp_path):
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "out") as folder:
        (folder / "absent").read_bytes()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path, mask):
    from safetensors.numpy import save_file

    target, before = tmp_path / "out", os.umask(mask)
    try:
        with new_folder(target) as folder:
            fill(folder, 1)
            save_file({}, folder / "model.safetensors")  # makes its file for the owner alone
            (folder / "1_Pooling" / "config.json").chmod(0o400)
            (folder / "link").symlink_to("config.json")
    finally:
        os.umask(before)
    for path in (target, *target.rglob("*")):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask


# -- no room


class Full:
    """Stands for a call into the file system that fails from its `first`-th time on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, first: int) -> None:
        self.left, self.original = first, getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: object, **options: object) -> object:
        self.left -= 1
        if self.left <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.original(*args, **options)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("call", "first"), [("mkdir", 1), ("mkdir", 2), ("fsync", 1), ("fsync", 3), ("rename", 1), ("fchmod", 2)]
)
def test_a_full_disk_at_any_call(tmp_path, monkeypatch, call, first, force):
    target = tmp_path / "out"
    if force:
        write(target, 1)
    with monkeypatch.context() as patch:
        Full(patch, call, first)
        message = refusal(OutputError, lambda: write(target, 2, force=force))
    assert message.startswith(f"cannot write {target}: No space left on device (") and message.endswith(
        "bytes were free)"
    )
    assert version_of(target) == (1 if force else None) and hidden(tmp_path) == []


def test_the_second_rename_fails(tmp_path, monkeypatch):
    target, rename, tried = tmp_path / "out", os.rename, []
    write(target, 1)

    def fails_once(old: str, new: str) -> None:
        tried.append(new)
        if len(tried) == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails_once)
        assert "Input/output error" in refusal(OutputError, lambda: write(target, 2, force=True))
    assert tried[1:3] == [target, target]
    assert version_of(target) == 1 and hidden(tmp_path) == []


@pytest.mark.parametrize(("name", "code"), [("quota", errno.EDQUOT), ("limit", errno.EFBIG), ("read", errno.EROFS)])
def test_other_faults_of_the_disk(tmp_path, name, code):
    def fails() -> None:
        with new_folder(tmp_path / "out") as folder:
            fill(folder, 1)
            raise OSError(code, name)

    assert os.strerror(code) in refusal(OutputError, fails)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_told_before_anything_is_written(tmp_path):
    def needs() -> None:
        with new_folder(tmp_path / "out", needed=10**18):
            pytest.fail("it began")

    message = refusal(OutputError, needs)
    assert f"cannot write {tmp_path / 'out'}: {10**18} bytes needed, " in message and message.endswith(" free")
    with new_folder(tmp_path / "out", needed=1) as folder:
        fill(folder, 1)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no small file system can be mounted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def by_python(folder: Path) -> None:
    for name in ("a", "b", "c"):
        (folder / name).write_bytes(bytes(90_000))


def by_safetensors(folder: Path) -> None:
    import numpy
    from safetensors.numpy import save_file

    save_file({"weight": numpy.zeros(80_000)}, folder / "model.safetensors")


def by_transformers(folder: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 100}
    BertModel(BertConfig(vocab_size=200, **sizes)).save_pretrained(folder)


@pytest.mark.parametrize("filling", [by_python, by_safetensors, by_transformers])
def test_a_small_disk(small_disk, filling):
    target = small_disk / "out"

    def fills() -> None:
        with new_folder(target) as folder:
            filling(folder)

    message = refusal(OutputError, fills)
    assert message == f"cannot write {target}: No space left on device (204800 bytes were free)"
    assert list(small_disk.iterdir()) == []
    assert shutil.disk_usage(small_disk).free == 204800


# -- other runs


def test_a_run_that_goes_on_is_not_disturbed(tmp_path):
    target = tmp_path / "out"
    with new_folder(target) as folder:
        fill(folder, 1)
        message = refusal(OutputError, lambda: write(target, 2))
        assert message == f"cannot write {target}: another run is writing it"
        with new_folder(tmp_path / "out2") as other:  # another target
            fill(other, 3)
    assert (version_of(target), version_of(tmp_path / "out2")) == (1, 3) and hidden(tmp_path) == []


def test_a_target_that_another_run_wrote_meanwhile(tmp_path):
    target = tmp_path / "out"

    def loses() -> None:
        with new_folder(target) as folder:
            fill(folder, 1)
            target.mkdir()
            fill(target, 2)

    assert refusal(OutputError, loses) == f"{target} exists already: something else has written it meanwhile"
    assert version_of(target) == 2 and hidden(tmp_path) == []


def test_a_stranger_that_came_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "out"

    def loses() -> None:
        with new_folder(target, force=True) as folder:
            fill(folder, 1)
            target.mkdir()
            (target / "letter.txt").write_text("dear")

    assert "is no checkpoint" in refusal(UsageError, loses)
    assert (target / "letter.txt").read_text() == "dear" and hidden(tmp_path) == []


def test_leftovers_of_killed_runs(tmp_path):
    dead = tmp_path / ".out.headscope-999999999-0123abcd"
    for name in (dead.name, ".other.headscope-1-ab", ".out.headscope-x-ab", ".out.headscope-1-ab.txt"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name, 7)
    (tmp_path / ".out.headscope-2-cd").write_text("a file")
    others = hidden(tmp_path)[:]
    others.remove(dead.name)
    write(tmp_path / "out", 1)
    assert version_of(tmp_path / "out") == 1 and hidden(tmp_path) == others


def test_an_old_folder_that_a_kill_left_aside(tmp_path):
    target, new = tmp_path / "out", tmp_path / ".out.headscope-999999999-0123abcd"
    old = new.with_name(new.name + ".old")
    for folder, version in ((old, 1), (new, 2)):  # killed between the renames
        folder.mkdir()
        fill(folder, version)
    assert "exists already" in refusal(UsageError, lambda: check_target(target, None, force=False))
    assert version_of(target) == 1 and not old.exists()
    old.mkdir()
    fill(old, 0)  # killed after the renames
    write(target, 3, force=True)
    assert version_of(target) == 3 and hidden(tmp_path) == []


def test_an_old_folder_that_was_replaced_does_not_come_back(tmp_path):
    target, old = tmp_path / "out", tmp_path / ".out.headscope-999999999-0123abcd.old"
    old.mkdir()
    fill(old, 1)  # killed after the renames, and the new one was removed by hand
    write(target, 2)
    assert version_of(target) == 2
    write(target, 3, force=True)
    assert version_of(target) == 3 and hidden(tmp_path) == []


def test_an_old_folder_that_cannot_be_put_back(tmp_path, monkeypatch):
    target, new = tmp_path / "out", tmp_path / ".out.headscope-999999999-0123abcd"
    old = new.with_name(new.name + ".old")
    new.mkdir()
    old.mkdir()
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EACCES, "Permission denied")))
    with pytest.raises(OutputError, match="cannot put .*out back: Permission denied") as caught:
        check_target(target, None, force=True)
    assert caught.value.hint == f"mv {old} {target}" and old.exists()


def test_without_locks_what_may_be_in_use_stays(tmp_path, monkeypatch):
    leftover = tmp_path / ".out.headscope-999999999-0123abcd"
    leftover.mkdir()

    def unsupported(*_: object) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    write(tmp_path / "out", 1)
    assert version_of(tmp_path / "out") == 1 and hidden(tmp_path) == [leftover.name]


def test_a_run_that_was_taken_for_a_leftover(tmp_path, monkeypatch):
    def removed(descriptor: int, *_: object) -> None:
        os.rmdir(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(fcntl, "flock", removed)
    assert "another run is writing it" in refusal(OutputError, lambda: write(tmp_path / "out", 1))
    assert list(tmp_path.iterdir()) == []


def test_an_old_folder_that_cannot_be_removed(tmp_path, monkeypatch):
    target = tmp_path / "out"
    write(target, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    message = refusal(OutputError, lambda: write(target, 2, force=True))
    assert message.startswith(
        f"{target} is written, but the old one could not be removed: {tmp_path / '.out.headscope'}"
    )
    assert version_of(target) == 2


# -- refused targets


@pytest.fixture
def model(tmp_path):
    made = tmp_path / "models" / "model"
    made.mkdir(parents=True)
    fill(made, 1)
    return made


def test_a_target_that_exists(tmp_path, model):
    with pytest.raises(UsageError, match="exists already") as caught:
        check_target(model, None, force=False)
    assert caught.value.hint == "pass --force to replace it"
    check_target(model, None, force=True)
    file = tmp_path / "file"
    file.write_text("")
    for force in (False, True):
        assert refusal(UsageError, lambda force=force: check_target(file, None, force=force)) == (
            f"{file} is a file, not a folder"
        )


def test_only_checkpoints_and_empty_folders_are_replaced(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    write(target, 1, force=True)
    (target / "config.json").unlink()
    assert "is no checkpoint" in refusal(UsageError, lambda: write(target, 2, force=True))
    assert len(list(target.iterdir())) == 3
    assert "is a mount point" in refusal(UsageError, lambda: check_target(Path("/"), None, force=True))


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "way", ["itself", "inside", "deep", "around", "dots", "link", "linked parent", "linked source"]
)
def test_a_target_that_is_holds_or_lies_in_the_source(tmp_path, model, monkeypatch, way, force):
    (tmp_path / "link").symlink_to(model)
    (model / "sub").mkdir()
    monkeypatch.chdir(model)
    target = {
        "itself": model,
        "inside": model / "out",
        "deep": model / "sub" / "out",
        "around": model.parent,
        "dots": Path("sub/../../model/out"),
        "link": tmp_path / "link",
        "linked parent": tmp_path / "link" / "out",
        "linked source": model / "out",
    }[way]
    source = tmp_path / "link" if way == "linked source" else model
    message = refusal(UsageError, lambda: check_target(target, source, force=force))
    assert (
        message
        == f"{target} {'holds the model' if way == 'around' else 'is the model that is read, or lies in it'}"
        + (" that is read" if way == "around" else "")
    )
    assert not (model / "out").exists()


def test_a_source_by_another_name_of_the_file_system(model, monkeypatch):
    """As on a disk that knows no case, or where one folder is mounted twice: equal is what the system says is equal."""
    same = os.path.samefile
    monkeypatch.setattr(os.path, "samefile", lambda a, b: str(a).lower() == str(b).lower() or same(a, b))
    target = model.with_name("MODEL")
    target.mkdir()
    assert "is the model that is read" in refusal(UsageError, lambda: check_target(target, model, force=True))
    assert "is the model that is read" in refusal(UsageError, lambda: check_target(target / "o", model, force=False))


def test_a_target_beside_a_source_that_is_one_file(model):
    source = model / "model-1.safetensors"
    check_target(model / "out", source, force=False)
    assert "holds the model" in refusal(UsageError, lambda: check_target(model, source, force=True))


def test_a_parent_that_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(OutputError, match="does not exist") as caught:
        check_target(tmp_path / "no" / "out", None, force=False)
    assert caught.value.hint == f"mkdir -p {tmp_path / 'no'}"
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refusal(OutputError, lambda: check_target(tmp_path / "file" / "o", None, force=False))
    name = tmp_path / ("x" * 256)
    assert "File name too long" in refusal(OutputError, lambda: check_target(name, None, force=False))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is not writable" in refusal(OutputError, lambda: check_target(tmp_path / "out", None, force=False))
    assert not (tmp_path / "no").exists()


def test_an_old_folder_that_is_not_ours_to_remove(tmp_path, model, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != model)
    assert "cannot replace" in refusal(OutputError, lambda: check_target(model, None, force=True))


def test_links_are_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "out"
    link.symlink_to("disk/real")
    write(link, 1)
    assert link.is_symlink() and version_of(tmp_path / "disk" / "real") == 1
    assert "exists already" in refusal(UsageError, lambda: check_target(link, None, force=False))
    write(link, 2, force=True)
    assert link.is_symlink() and version_of(link) == 2 and hidden(tmp_path) == hidden(tmp_path / "disk") == []
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "in a circle" in refusal(UsageError, lambda: check_target(tmp_path / "a", None, force=False))


def test_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a b", "é\U0001f600", "x" * 255, "-o", "[a-z]*", "(c++", ".hidden", "new\nline", "a.headscope-1-ab"):
        write(Path(name), 1)
        write(Path(name), 2, force=True)
        assert version_of(tmp_path / name) == 2
    assert hidden(tmp_path) == [".hidden"]
    latin = Path(os.fsdecode(b"caf\xe9"))
    assert "is not UTF-8" in refusal(UsageError, lambda: check_target(latin, None, force=False))
