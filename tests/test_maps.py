"""One head's map equals transformers' own; its pictures fit 80 columns, repeat to the byte and are safe to look at."""

import csv
import io
import re
from functools import partial

import pytest
import tiny_tokenizers
import torch
from checkpoints import command, refused
from conftest import SAMPLES
from rich.cells import cell_len
from zoo import SPECIMENS

from headscope.data import DataOptions
from headscope.errors import UsageError
from headscope.maps import MAP_COLUMNS, attention_map, find_head, map_table
from headscope.models import LoadOptions
from headscope.reports._map import map_figure, render_map
from headscope.reports._picture import save_picture
from headscope.study import Study, StudyOptions

NAMES = [column.name for column in MAP_COLUMNS]
SENTIMENT, LLAMA, G2P = (SAMPLES / name for name in ("sentiment-minilm", "llama-gqa-web", "t5-g2p"))
SENTENCE = "A film so dull that even its best jokes fall flat."
HOSTILE = ["\x1b[31mred", "$x^2_{", "=1+1", "日本", "\u202eevil", "", " ", "a\nb", "\\frac", "e\u0301"]
ZOO = [
    ("bert", "bert"), ("albert", "bert"), ("gpt2", "gpt2"), ("llama", "llama"), ("gpt_oss", "llama"), ("bloom", "gpt2"),
    ("t5", "t5"), ("bart", "bart"),
]  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsysbinary):
    monkeypatch.setenv("COLUMNS", "80")
    return command(monkeypatch, capsysbinary)


def own_maps(study, **inputs):
    """The maps that transformers gives itself, in the order of the sites."""
    model = study.loaded.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        result = model(**{name: torch.tensor([ids]) for name, ids in inputs.items()}, output_attentions=True)
    model.set_attn_implementation(before)
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return [maps[0] for name in names for maps in (getattr(result, name, None) or ())]


def same(study, text, target=None, **inputs):
    """Whether the maps of every site's last head equal transformers' own."""
    maps = own_maps(study, **inputs)
    assert len(maps) == len(study.sites)
    for site, own in zip(study.sites, maps, strict=True):
        found = attention_map(study, text, str(site.heads[-1]), target=target)
        assert found.rows.shape == own.shape[1:] == (len(found.queries), len(found.keys))
        torch.testing.assert_close(found.rows, own[-1].double(), rtol=1e-5, atol=2e-6, msg=str(site.id))
        assert bool((found.rows[~found.visible] == 0).all())
        yield found


@pytest.mark.parametrize(("name", "form"), ZOO)
def test_a_map_is_transformers_own(name, form, tmp_path):
    tokenizer = tiny_tokenizers.tokenizer(form)
    folder = tiny_tokenizers.save(tmp_path, SPECIMENS[name].build().float(), tokenizer)
    study = Study.open(folder, None, StudyOptions(LoadOptions(dtype="float32")))
    text, target = "w3 w17 w5 w40 w5", "w8 w9 w2"
    inputs = {"input_ids": tokenizer(text)["input_ids"]}
    if form in ("t5", "bart"):
        ids = tokenizer(target)["input_ids"]
        inputs["decoder_input_ids"] = [study.loaded.model.config.decoder_start_token_id, *ids[:-1]]
    maps = list(same(study, text, target if "decoder_input_ids" in inputs else None, **inputs))
    tokens = {key: tuple(tokenizer.convert_ids_to_tokens(ids)) for key, ids in inputs.items()}
    for found in maps:
        stack, kind = found.head.site.stack, str(found.head.site.kind)
        asking = tokens["decoder_input_ids" if stack == "decoder" and len(tokens) > 1 else "input_ids"]
        assert found.queries == asking
        assert found.keys == (tokens["input_ids"] if kind == "cross" else asking)
    assert {str(found.head.site.kind) for found in maps} >= ({"cross"} if len(inputs) > 1 else set())


def test_the_map_of_a_long_text_is_transformers_own(monkeypatch):
    """The rows of long texts come block by block from tiles."""
    monkeypatch.setattr("headscope.tiles.LONG", 0)
    monkeypatch.setattr("headscope.tiles.VALUES", 8 * 200 * 30)
    study = Study.open(str(LLAMA), None, StudyOptions(LoadOptions(), DataOptions(max_length=200)))
    text = " ".join(f"word{number} and" for number in range(60))
    ids = study.loaded.tokenizer()(text)["input_ids"][:200]
    found = list(same(study, text, input_ids=ids))
    assert found[0].notes == ("the text was cut to 200 tokens",)


def test_a_decoder_reads_what_the_model_writes():
    study = Study.open(str(G2P))
    tokenizer, model, text = study.loaded.tokenizer(), study.loaded.model, "a b d u l l a"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    written = [model.config.decoder_start_token_id]
    for _ in range(40):
        with torch.no_grad():
            written.append(int(model(input_ids=ids, decoder_input_ids=torch.tensor([written])).logits[0, -1].argmax()))
        if written[-1] == model.config.eos_token_id:
            break
    maps = list(same(study, text, input_ids=ids[0].tolist(), decoder_input_ids=written[:-1]))
    assert maps[-1].keys == ("a", "b", "d", "u", "l", "l", "a", "</s>")
    assert maps[-1].queries == tuple(tokenizer.convert_ids_to_tokens(written[:-1]))


def test_only_the_sites_own_rows_are_read(monkeypatch):
    seen = []
    read = __import__("headscope.reading", fromlist=["read"]).read
    monkeypatch.setattr("headscope.reading.read", lambda site, *rest: seen.append(str(site.id)) or read(site, *rest))
    attention_map(Study.open(str(SENTIMENT)), SENTENCE, "encoder.self.2.3")
    assert seen == ["encoder.self.2"]


def test_letters_of_byte_vocabularies_are_readable():
    found = attention_map(Study.open(str(LLAMA)), "The quick é", "1.2")
    assert found.queries[:4] == ("<|bos|>", "The", " qu", "ick")


def test_heads_are_named_in_full_or_short():
    sites = Study.open(str(SENTIMENT)).sites
    assert str(find_head(sites, "2.3")) == str(find_head(sites, "encoder.self.2.3")) == "encoder.self.2.3"
    cases = {
        "9.3": ("no head encoder.self.9.3", "nearest: encoder.self.5.3, "),
        "decoder.self.1.2": ("no head decoder.self.1.2", "nearest: encoder.self.1.2, "),
        "1": ("write encoder.self.3.7", "nearest: encoder."),
        "2.1,2.3": ("2 heads, and a map shows one", "name one"),
        "": ("no head named", "nearest: encoder."),
    }
    for label, (message, hint) in cases.items():
        with pytest.raises(UsageError, match=re.escape(message)) as caught:
            find_head(sites, label)
        assert hint in str(caught.value.hint)


def test_rows_of_the_command(run, tmp_path):
    ran = run("inspect", SENTIMENT, "--text", SENTENCE, "--head", "2.3")
    rows = list(csv.DictReader(io.StringIO(ran.out)))
    assert (ran.code, ran.err, list(rows[0])) == (0, "", NAMES)
    assert [row["key_token"] for row in rows[:14]] == ["[CLS]", *SENTENCE[:-1].lower().split(), ".", "[SEP]"]
    assert len(rows) == 14 * 14
    sums = [sum(float(row["attention"]) for row in rows if row["query"] == str(query)) for query in range(14)]
    assert sums == pytest.approx([1.0] * 14, abs=1e-6)
    found = map_table(study := Study.open(str(SENTIMENT)), attention_map(study, SENTENCE, "2.3"))
    assert [float(row["attention"]) for row in rows] == [row["attention"] for row in found.rows]
    top = run("inspect", SENTIMENT, "--text", SENTENCE, "--head", "2.3", "--sort", "attention", "--top", "2").rows
    assert float(top[1][4]) == max(float(row["attention"]) for row in rows)
    table = run("inspect", SENTIMENT, "--text", SENTENCE, "--head", "2.3", "--top", "2", "--format", "table")
    assert "query_token" in table.out
    picture = run("inspect", SENTIMENT, "--text", SENTENCE, "--head", "2.3", "--format", "table")
    assert picture.out.startswith("attention of encoder.self.2.3, ")
    assert " 0 [CLS] @@\n" in picture.out
    file = tmp_path / "map.txt"
    run("inspect", SENTIMENT, "--text", SENTENCE, "--head", "2.3", "--format", "table", "-o", file)
    assert file.read_text() == picture.out


WRONG = [
    (["--text", "a"], ["--text needs --head"]),
    (["--head", "0.0"], ["--head needs --text"]),
    (["--target-text", "a"], ["--target-text needs --text"]),
    (["--text", "a", "--head", "0.0", "--data", "d.jsonl"], ["--text and --data"]),
    (["--text", "a", "--head", "0.0", "--check"], ["--text and --check"]),
    (["--text", "a", "--head", "0.0", "--by", "layer"], ["--text and --by"]),
    (["--text", " ", "--head", "0.0"], ["--text is empty"]),
    (["--text", "a", "--head", "0.0", "--columns", "atention"], ["did you mean 'attention'?"]),
    (["--text", "a", "--head", "0.0", "--on-long", "error"], ["--on-long is about data"]),
    (["--text", "a", "--head", "0.0", "--plot", "x.gif"], [".gif"]),
]


@pytest.mark.parametrize(("words", "parts"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_wrong_use_is_refused_before_a_model_is_opened(run, monkeypatch, words, parts):
    monkeypatch.setattr("headscope.study.load", None)
    assert refused(run("inspect", "m", *words), 2, *parts)


def test_what_a_model_cannot_show_is_refused(run):
    long = "film " * 60
    assert refused(run("inspect", SAMPLES / "vit-digits", "--text", "a", "--head", "0.0"), 2, "reads images")
    assert refused(run("inspect", SENTIMENT, "--text", "a", "--head", "7.0"), 2, "nearest: encoder.self.5.0")
    assert refused(
        run("inspect", SENTIMENT, "--text", long, "--head", "0.0", "--format", "table"), 2, "40", "--max-length 40"
    )
    assert refused(run("inspect", SENTIMENT, "--text", "film " * 999, "--head", "0.0"), 2, "--max-length N cuts")
    assert refused(run("inspect", SENTIMENT, "--text", "a", "--target-text", "b", "--head", "0.0"), 2, "--target-text")
    ran = run("inspect", SENTIMENT, "--text", long, "--head", "0.0", "--format", "table", "--max-length", "40")
    assert (ran.code, ran.err) == (0, "note: the text was cut to 40 tokens\n")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert len(run("inspect", SENTIMENT, "--text", long, "--head", "0.0").rows) == 62 * 62 + 1


def grid(queries, keys):
    """Made-up attention, with keys of the future unseen."""
    return [[1 / (1 + abs(q - k)) if k <= q + 5 else float("nan") for k in range(keys)] for q in range(queries)]


@pytest.mark.parametrize("color", [False, True])
@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (10, 10), (40, 40), (3, 40), (40, 2)])
def test_a_picture_is_never_wider_than_the_terminal(queries, keys, width, color):
    names = [*HOSTILE, "a very long token that goes on and on", *(f"t{number}" for number in range(40))]
    title = "attention of 日本\x1b[2J in a model with a long name that goes on and on and on"
    text = render_map(grid(queries, keys), names[:queries], names[:keys], title=title, width=width, color=color)
    visible = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert visible.isprintable() or all(line.isprintable() for line in visible.splitlines())
    assert "\x1b" in text if color else "\x1b" not in text
    assert max(cell_len(line) for line in visible.splitlines()) <= width
    picture = visible.splitlines()[: -4 if color else -3]
    rows = [line for line in picture if re.match(r" ?\d+ ", line)]
    assert len(rows) == queries if width >= 80 else len(rows) >= queries, "no picture is cut at 80 columns"


def test_a_picture_by_hand():
    rows = [[1.0, float("nan")], [0.049, 0.951]]
    text = render_map(rows, ["A", " b"], ["A", " b"], title="title", width=40, color=False)
    lines = text.splitlines()
    assert lines[:6] == ["title", "", "       ▁", "     A b", "0 A  @@", "1 ▁b ..@@"]
    assert lines[-1] == "blank: under 0.02, or not seen"


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_drawings_repeat_to_the_byte_and_take_any_token(suffix, tmp_path):
    for name in ("a", "b"):
        path = tmp_path / f"{name}{suffix}"
        hostile = partial(map_figure, grid(10, 10), HOSTILE, HOSTILE, title="attention of $x^2_{\x1b")
        save_picture(hostile, path)
    first, second = (tmp_path / f"{name}{suffix}" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        save_picture(hostile, first)
    many = partial(map_figure, grid(130, 3), ["x"] * 130, ["y"] * 3, title="many")
    save_picture(many, tmp_path / f"many{suffix}")
    with pytest.raises(UsageError, match="600 tokens"):
        map_figure([[0.0] * 600], ["x"], ["y"] * 600, title="")


def test_the_command_draws(run, tmp_path):
    words = ("inspect", G2P, "--text", "a b d u l l a", "--head", "decoder.cross.1.2")
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    once, again = run(*words, "--plot", first), run(*words, "--plot", second)
    assert (once.code, once.out) == (0, again.out)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG")
