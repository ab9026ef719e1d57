"""The model card: front matter that a YAML parser reads back, tables that no name breaks, and what each layout says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from markdown_it import MarkdownIt

from headscope.card import CardFacts, Quality, SiteLine, card, source_licence
from headscope.unpack import printable

PARSER = MarkdownIt("commonmark").enable("table")

HOSTILE = [
    "a: b",
    "---\nlicense: mit",
    "x\n---\n# owned",
    "'\"",
    "{a: [b",
    "*alias &anchor",
    "!!python/object/apply:os.system [id]",
    "a | b",
    "`code` | \\| \\",
    "<script>alert(1)</script>",
    "[click](https://evil.example)",
    "![x](https://evil.example/x.png)",
    "https://evil.example",
    "\x1b[31mred\x07",
    "\u202egnp.exe",
    "```\nimport os\n```",
    "\ud800",
    "null",
    "2024-01-01",
    "no",
    "&lt;b&gt; $x$",
    "\U000e0041\U0001f600",
]


def facts(**changed) -> CardFacts:
    made = CardFacts(
        base_model="someone/model",
        base_revision="0123abc",
        licence="apache-2.0",
        pipeline_tag="text-classification",
        auto_class="AutoModelForSequenceClassification",
        layout="portable",
        heads=(SiteLine("encoder.self.0", 12, 9, 6, 5, (1, 3, 4)), SiteLine("encoder.self.1", 12, 12, 6, 6, ())),
        parameters_before=12_500_000,
        parameters_after=12_000_000,
        macs_before=1000,
        macs_after=900,
        kv_before=2048,
        kv_after=1536,
        quality_before=Quality(0.25, "accuracy", 0.9, 0.0),
        quality_after=Quality(0.375, "accuracy", 0.875, 0.0625),
        data="dev.jsonl",
        criterion="importance",
        proof={"masked = pruned, float64": 3e-16, "reloaded = pruned": 0.0},
        generation=False,
    )
    return replace(made, **changed)


def front_matter(text: str) -> tuple[dict, str]:
    """The fields between the first two lines of three dashes, and the rest."""
    lines = text.split("\n")
    assert lines[0] == "---"
    end = lines.index("---", 1)
    return yaml.safe_load("\n".join(lines[1:end])), "\n".join(lines[end + 1 :])


def cells(line: str) -> list[str]:
    """The cells of a line of a GFM table: a bar behind an odd number of backslashes parts nothing."""
    found, current, escaped = [], "", False
    for char in line.strip()[1:-1]:
        if char == "|" and not escaped:
            found.append(current.strip())
            current = ""
            continue
        escaped = char == "\\" and not escaped
        current += char
    return [*found, current.strip()]


def named(name: str) -> CardFacts:
    """Facts in which everything that may hold foreign text is `name`."""
    return facts(
        base_model=name,
        base_revision=name,
        licence=name,
        pipeline_tag=name,
        heads=(SiteLine(name, 2, 1, 2, 1, (0,)),),
        data=name,
        criterion=name,
        quality_before=Quality(1.0, name, 1.0),
        quality_after=Quality(1.0, name, 1.0),
        proof={name: 0.0},
    )


def shape(markdown: str) -> list[str]:
    """What a Markdown parser makes of it: the kinds of all blocks and of what stands in them, without the words."""
    kinds: list[str] = []
    for token in PARSER.parse(markdown):
        kinds.append(token.type)
        kinds += sorted({"text" if child.type == "text_special" else child.type for child in token.children or ()})
    return kinds


def inline_texts(markdown: str) -> list[str]:
    return [
        "".join(child.content for child in token.children or ())
        for token in PARSER.parse(markdown)
        if token.type == "inline"
    ]


def table(text: str, heading: str) -> list[list[str]]:
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [cells(line) for line in section.splitlines() if line.startswith("|")]


def test_front_matter():
    fields, _ = front_matter(card(facts()))
    assert fields == {
        "base_model": "someone/model",
        "library_name": "transformers",
        "tags": ["headscope", "head-pruning", "pruned"],
        "license": "apache-2.0",
        "pipeline_tag": "text-classification",
    }


def test_what_is_unknown_is_left_out():
    text = card(facts(licence=None, pipeline_tag=None, base_revision=""))
    fields, body = front_matter(text)
    assert set(fields) == {"base_model", "library_name", "tags"}
    assert "states no licence" in body and "revision" not in body
    assert "states no licence" not in card(facts())


@pytest.mark.parametrize(
    ("path", "name"),
    [("/home/somebody/private/my-model", "my-model"), ("../a/b/", "b"), ("~/m", "m"), ("/", "local-model")],
)
def test_a_local_path_is_not_published(path, name):
    text = card(facts(base_model=path, base_revision=""))
    assert front_matter(text)[0]["base_model"] == name
    assert "somebody" not in text and "private" not in text


def test_a_folder_that_is_called_dot_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert facts(base_model=".", base_revision="").base_name == tmp_path.name


def test_body():
    _, body = front_matter(card(facts()))
    assert "3 of 24 attention heads were removed from someone/model (revision 0123abc) by headscope." in body
    assert "chosen by: importance, on dev.jsonl." in body
    assert table(body, "Heads")[2:] == [
        ["encoder.self.0", "12", "9", "6", "5", "1, 3, 4"],
        ["encoder.self.1", "12", "12", "6", "6", "none"],
    ]
    assert table(body, "Before and after")[2:] == [
        ["parameters", "12,500,000", "12,000,000", "-4.0%"],
        ["multiply-accumulates a token", "1,000", "900", "-10.0%"],
        ["KV-cache bytes a token", "2,048", "1,536", "-25.0%"],
        ["loss", "0.25", "0.375", "+0.125"],
        ["accuracy", "0.9", "0.875", "-0.025"],
        ["divergence from the base model", "0", "0.0625", "+0.0625"],
    ]
    assert table(body, "Proof")[2:] == [["masked = pruned, float64", "3e-16"], ["reloaded = pruned", "0"]]


def test_what_was_not_measured():
    text = card(facts(quality_before=None, quality_after=None, kv_before=0, kv_after=0, data="", proof={}))
    assert "What the model scores now was not measured." in text and "Nothing was checked." in text
    assert [row[0] for row in table(text, "Before and after")[2:]] == ["parameters", "multiply-accumulates a token"]
    assert "chosen by: importance." in text
    half = card(facts(quality_before=None, quality_after=Quality(loss=0.5)))
    assert table(half, "Before and after")[5:] == [["loss", "not measured", "0.5", ""]]
    assert "was not measured." not in half


@pytest.mark.parametrize("layout", ["native", "portable", "masked"])
def test_how_to_load_and_limits(layout):
    text = card(facts(layout=layout))
    call = 'AutoModelForSequenceClassification.from_pretrained("path/to/this/folder"'
    assert f"{call}{', trust_remote_code=True' if layout == 'portable' else ''})" in text
    assert ("headscope.load(" in text) == ("vLLM, llama.cpp, TGI" in text) == (layout == "portable")
    assert ("save neither time nor memory" in text) == ("were set to zero in" in text) == (layout == "masked")
    assert ("instead of reading it in config.json" in text) == (layout == "native")
    assert "not trained again" in text
    blocks = text.split("```")[1::2]
    for block in blocks:
        compile(block.removeprefix("python"), "card", "exec")
    assert len(blocks) == (2 if layout == "portable" else 1)


def test_continuous_batching_is_told_where_kv_heads_differ():
    sentence = "Continuous batching"
    assert sentence in card(facts(generation=True))
    assert sentence not in card(facts())
    assert sentence not in card(facts(generation=True, heads=(SiteLine("decoder.causal.0", 8, 4, 4, 2, (1, 2)),)))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names(name):
    text = card(named(name))
    text.encode("utf-8")
    assert all(char.isprintable() or char == "\n" for char in text)
    fields, body = front_matter(text)
    assert list(fields) == ["base_model", "library_name", "tags", "license", "pipeline_tag"]
    assert all(isinstance(fields[key], str) for key in ("base_model", "license", "pipeline_tag"))
    if name.isprintable():
        assert fields["base_model"] == fields["license"] == name
    plain = front_matter(card(named("name")))[1]
    assert shape(body) == shape(plain)
    assert len(inline_texts(body)) == len(inline_texts(plain))
    for found, wanted in zip(inline_texts(body), inline_texts(plain), strict=True):
        assert found == wanted.replace("name", printable(name))
    assert "https://" not in body  # GitHub and the Hub make links of bare addresses


def test_text_that_stands_in_code_is_refused():
    with pytest.raises(ValueError, match="no class"):
        facts(auto_class='A")\nimport os')
    with pytest.raises(ValueError, match="no layout 'ragged'"):
        facts(layout="ragged")


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- a\n---\n# x", "apache-2.0"),
        ("\ufeff---\r\nlanguage: en\r\nlicense:  mit  \r\n---\r\n", "mit"),
        ("---\nlicense: no\n---\n", "no"),
        ("---\ndate: 2023-99-99\nlicense: 'x'\n---\n", "x"),
        ("---\nlicense:\n- mit\n- other\n---\n", None),
        ("---\nlicense: {a: b}\n---\n", None),
        ("---\nlicense:\n---\n", None),
        ("---\n- license\n---\n", None),
        ("---\nlicense: mit\n", None),
        ("# title\n\nlicense: mit\n\n---\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\nlicense: !!python/object/apply:os.system [id]\n---\n", None),
        ("---\na: " + "[" * 50_000 + "\n---\n", None),
        ("", None),
    ],
)
def test_source_licence(tmp_path, readme, licence):
    (tmp_path / "README.md").write_bytes(readme.encode())
    assert source_licence(tmp_path) == licence


def test_source_without_a_readable_card(tmp_path, samples):
    assert source_licence(tmp_path) is None
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert source_licence(tmp_path) is None
    outside = tmp_path / "outside.md"
    outside.write_text("---\nlicense: mit\n---\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "README.md").symlink_to(outside)
    assert source_licence(model) is None
    for sample in sorted(samples.iterdir()):
        if sample.is_dir():
            assert source_licence(sample) is None  # their licences stand in LICENSE files only


def test_a_card_can_be_read_back(tmp_path):
    (tmp_path / "README.md").write_text(card(facts()), encoding="utf-8")
    assert source_licence(tmp_path) == "apache-2.0"


def test_the_hub_library_reads_the_card():
    from huggingface_hub import ModelCard

    data = ModelCard(card(facts())).data
    assert (data.base_model, data.license, data.pipeline_tag) == ("someone/model", "apache-2.0", "text-classification")
