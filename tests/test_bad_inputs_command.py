"""Bad input on the command line and from the Hub: one line, the exit code it deserves, and nothing loaded or leaked."""

import os
from types import SimpleNamespace

import huggingface_hub
import pytest
from bad_inputs import collector, made_room, names, tiny_models  # noqa: F401
from checkpoints import configure, refused
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RevisionNotFoundError

CASES, case = collector()
TOKEN = "hf_secretsecretsecret"


@case("B006")
def shares_that_are_none(room):
    """Anything but 0 <= R < 1 is refused before a model is opened; 100 and 1 ask what was meant."""
    room.monkeypatch.setattr("headscope.pruning.load", None)
    for value in ("1.5", "-0.1", "nan", "inf", "-inf", "1e999", "x", "100", "1", "30"):
        ran = room.run("prune", room.models("classifier"), "--ratio", value, "--criterion", "random", "-o", "x")
        assert refused(ran, 2, "--ratio", "0 <= R < 1"), value
        assert ("1.0 would remove every head" in ran.err) is (value in ("100", "1")), value
    assert "did you mean 0.3?" in ran.err


@case("B008")
def a_head_twice(room):
    """One of them is dropped, and said; the result is that of naming it once, however often it is repeated."""
    model = room.models("classifier")
    once = room.run("prune", model, "--heads", "0.1", "--dry-run")
    for spec in ("0.1,0.1", "0:1,1", "encoder.self.0.1;0.1", ",".join(["0.1"] * 500)):
        ran = room.run("prune", model, "--heads", spec, "--dry-run")
        assert (ran.code, ran.out) == (0, once.out)
        assert "note: encoder.self.0.1: named twice\n" in ran.err
    assert "twice" not in once.err and once.code == 0


@case("B009")
def every_head_of_a_layer(room):
    model = room.models("classifier")
    ran = room.run("prune", model, "--heads", "1:0,1,2,3,4", "-o", room.path / "x")
    assert refused(ran, 2, "encoder.self.1", "leaves no head", "--min-heads 0")
    assert list(room.path.iterdir()) == []
    assert room.run("prune", model, "--heads", "1:0,1,2,3,4", "--min-heads", "0", "--dry-run").code == 0


@case("B012")
def an_attention_that_shows_no_maps(room):
    """Maps are there whatever computes the rest, with a note where another attention was asked for by name."""
    words = [
        "inspect",
        room.models("classifier"),
        "--data",
        room.labelled(),
        "--measures",
        "attention",
        "--attn-implementation",
    ]
    eager, sdpa = room.run(*words, "eager"), room.run(*words, "sdpa")
    assert (eager.code, sdpa.code) == (0, 0)
    assert sdpa.err.count("as eager attention does") == 1 and "as eager attention does" not in eager.err
    for one, other in zip(eager.rows[1:], sdpa.rows[1:], strict=True):
        assert one[:9] == other[:9] and one[-1] == other[-1] != ""
        for a, b in zip(one[9:-1], other[9:-1], strict=True):
            assert float(a) == pytest.approx(float(b), rel=1e-5)
    assert refused(room.run(*words, "sdpaa"), 2, "did you mean 'sdpa'?", "eager")
    assert refused(room.run(*words, "owner/kernel"), 2, "is code of the Hub", "--trust-remote-code")


def _broken_hub(room, error):
    def fail(*_, **__):
        raise error

    room.monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    room.monkeypatch.setenv("HF_TOKEN", TOKEN)


def _response(status):
    return SimpleNamespace(status_code=status, headers={}, request=None, text="", url="https://hub")


@case("B024")
def a_gated_model(room):
    _broken_hub(room, GatedRepoError(f"403 for {TOKEN}", response=_response(403)))
    ran = room.run("inspect", "owner/model")
    assert refused(ran, 1, "owner/model is gated", "hf auth login")
    assert TOKEN not in ran.err


@case("B025")
def a_revision_that_is_not_there(room):
    _broken_hub(room, RevisionNotFoundError("404", response=_response(404)))
    assert refused(room.run("inspect", "owner/model", "--revision", "v9"), 1, "owner/model has no revision 'v9'")
    room.monkeypatch.undo()
    ran = room.run("inspect", "no-such-owner/model", "--revision", "v9")
    assert refused(ran, 1, "no-such-owner/model is no folder here, and the Hub cannot be reached for revision v9")
    ran = room.run("inspect", room.models("classifier"), "--revision", "v9", "--by", "layer")
    assert ran.code == 0 and "note: --revision v9 is for the Hub" in ran.err


@case("B028")
def folders_that_cannot_be_read(room):
    (room.path / "a").symlink_to(room.path / "b")
    (room.path / "b").symlink_to(room.path / "a")
    assert refused(room.run("inspect", room.path / "a"), 1, "a link that leads nowhere")
    model = room.model()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    room.monkeypatch.setattr(os, "scandir", refuse)
    assert refused(room.run("inspect", model), 1, f"{model}: Permission denied")


@case("B039")
def code_of_a_stranger(room):
    """It is not run and no question is asked, though stdin and stdout claim to be a terminal."""
    canary = room.path / "canary"
    model = configure(room.model(), model_type="own", auto_map={"AutoConfig": "own.Own"})
    (model / "own.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Own: pass\n")
    room.monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    room.monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: pytest.fail("read")))
    for words in (["inspect", model], ["prune", model, "--heads", "0.0", "--dry-run"]):
        assert refused(room.run(*words), 1, "needs code that comes with it", "--trust-remote-code")
    assert not canary.exists()


@case("B105")
def a_push_that_fails(room):
    """The local checkpoint is kept and named, a repository that exists needs --force, and no token is said."""
    room.monkeypatch.setattr("headscope.verify.launch", _in_this_process())
    room.monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(room.path / "modules"))
    room.monkeypatch.setenv("HF_TOKEN", TOKEN)
    target, done = room.path / "small", []
    words = ["prune", room.models("classifier"), "--heads", "0.0", "-o", target, "--push-to-hub"]
    assert refused(room.run(*words, "a/b/c"), 2, "a/b/c is no repository", "owner/name")

    def create(name, exist_ok):
        if not exist_ok:
            raise HfHubHTTPError(f"409 with {TOKEN}", response=_response(409))
        return SimpleNamespace(repo_id=name, __str__=lambda: "")

    room.monkeypatch.setattr(huggingface_hub, "create_repo", create)
    room.monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **options: done.append(options))
    ran = room.run(*words, "owner/model")
    assert ran.code == 1 and ran.rows[0][0] == "site"
    assert f"error: {target} is written, but could not be pushed to owner/model: it exists already\n" in ran.err
    assert "\nhint: pass --force" in ran.err
    assert (target / "config.json").is_file() and not done

    ran = room.run(*words, "owner/model", "--force")
    assert ran.code == 0 and "pushed to " in ran.err
    assert [(one["repo_id"], one["folder_path"], one["delete_patterns"]) for one in done] == [
        ("owner/model", target, "*")
    ]

    def drop(**_):
        raise HfHubHTTPError(f"connection lost, token {TOKEN}\nmore", response=_response(500))

    room.monkeypatch.setattr(huggingface_hub, "upload_folder", drop)
    ran = room.run(*words, "owner/model", "--force")
    assert (
        ran.code == 1 and "connection lost, token [token]\n" in ran.err and f"hf upload owner/model {target}" in ran.err
    )
    assert TOKEN not in ran.err + ran.out

    room.monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "there is no token\nhint: run `hf auth login`" in room.run(*words, "owner/model", "--force").err
    assert (target / "config.json").is_file()


def _in_this_process():
    from headscope import reload

    return lambda arguments, scratch: reload.main(*arguments)


@pytest.mark.parametrize("kind", names(CASES))
def test_bad_input(kind, room):
    CASES[kind](room)
