"""Pictures of reports: what they show is what the rows say, for a few heads and for thousands."""

import math
import re

import pytest
from matplotlib.collections import PathCollection, PolyCollection
from report_samples import HOSTILE

from headscope import head_pictures
from headscope.columns import Column
from headscope.comparison_columns import columns_of
from headscope.comparison_picture import comparison_picture
from headscope.inspection import HEAD_COLUMNS, LAYER_COLUMNS, heat_map
from headscope.provenance import Provenance
from headscope.reports._bars import Bars, bars_figure
from headscope.reports._picture import encoded, inline_svg
from headscope.reports._removal import Block, Change, Removal, removal_figure
from headscope.study import load_scores
from headscope.tables import Table

ORIGIN = Provenance("some/model", data="data/test.csv", examples=7)
SCORES = tuple(
    column for score in load_scores(("importance", "attention", "weights")).values() for column in score.columns
)


def heads(layers, count, *, kinds=("decoder.causal",), columns=SCORES, value=lambda layer, index: layer + index / 10):
    """A report of heads: every measure has the value, and roles take turns."""
    rows = []
    for kind in kinds:
        stack, _, name = kind.partition(".")
        for layer in layers:
            for index in range(count):
                row = dict.fromkeys(column.name for column in HEAD_COLUMNS)
                row |= {"head": f"{kind}.{layer}.{index}", "stack": stack, "kind": name, "layer": layer, "index": index}
                row |= {column.name: value(layer, index) for column in columns}
                if "role" in row:
                    row["role"] = ("previous", "first", "mixed")[index % 3]
                rows.append(row)
    return Table("inspect", (*HEAD_COLUMNS, *columns), tuple(rows), "head", ORIGIN)


def panels(figure):
    """The panels by title."""
    return {axes.get_title().split("\n")[0]: axes for axes in figure.axes if axes.get_title()}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_picture_of_heads_has_a_map_profiles_and_roles():
    figure = head_pictures.head_picture(heads(range(3), 4))()
    shown = panels(figure)
    assert list(shown) == ["decoder.causal", "entropy", "distance", "qk_rank", "ov_rank", "heads of each role"]
    assert figure.get_suptitle() == "importance of the 12 heads of model, on 7 examples of test.csv"
    assert texts(shown["decoder.causal"]) == [f"{layer + index / 10:.2g}" for layer in range(3) for index in range(4)]
    (line,) = shown["entropy"].get_lines()
    assert list(line.get_ydata()) == pytest.approx([0.15, 1.15, 2.15])
    (dots,) = (found for found in shown["entropy"].collections if isinstance(found, PathCollection))
    assert dots.get_offsets().tolist() == [[layer, layer + index / 10] for layer in range(3) for index in range(4)]
    assert shown["distance"].get_ylabel() == "tokens"
    roles = shown["heads of each role"]
    assert [label.get_text() for label in roles.get_yticklabels()] == ["previous", "first", "mixed"]
    assert texts(roles) == ["2"] * 3 + ["1"] * 6, "heads 0 and 3 of each layer are the first role's"


def test_thousands_of_heads_have_bands_and_a_scale_instead_of_dots_and_numbers():
    shown = panels(head_pictures.head_picture(heads(range(80), 64))())
    assert texts(shown["decoder.causal"]) == texts(shown["heads of each role"]) == []
    assert max(shown["decoder.causal"].get_xticks()) <= 63 and max(shown["decoder.causal"].get_yticks()) <= 79
    (band,) = shown["entropy"].collections
    ends = [height for layer, height in band.get_paths()[0].vertices if layer == pytest.approx(40)]
    assert (min(ends), max(ends)) == pytest.approx((40.63, 45.67)), "a tenth of 0 to 6.3 from either end"
    assert shown["entropy"].get_lines()[0].get_markersize() == 0


def test_layers_keep_their_numbers_where_others_have_no_heads():
    table = heads((1, 4), 2, columns=SCORES[:1])
    assert heat_map(table, "importance") == {"decoder.causal": [[], [1.0, 1.1], [], [], [4.0, 4.1]]}
    shown = panels(head_pictures.head_picture(heads((1, 4), 2))())
    heights = shown["entropy"].get_lines()[0].get_ydata()
    assert [place for place, height in enumerate(heights) if not math.isnan(height)] == [1, 4]
    assert [text.get_position() for text in shown["decoder.causal"].texts] == [(0, 1), (1, 1), (0, 4), (1, 4)]


def test_values_of_both_signs_are_drawn_around_zero():
    effect = load_scores(("effect",))["effect"].columns
    figure = head_pictures.head_picture(heads(range(2), 2, columns=effect, value=lambda layer, index: layer - 0.75))()
    image = panels(figure)["decoder.causal"].images[-1]
    assert (image.norm.vmin, image.norm.vmax, image.get_cmap().name) == (-0.75, 0.75, "PuOr_r")
    assert "grey" not in str(figure.get_supxlabel())


def test_every_stack_and_kind_has_a_panel_a_line_and_roles():
    kinds = ("encoder.self", "decoder.causal", "decoder.cross")
    shown = panels(head_pictures.head_picture(heads(range(2), 3, kinds=kinds))())
    assert list(shown)[:3] == list(kinds)
    assert [title for title in shown if "role" in title] == [f"heads of each role, {kind}" for kind in kinds]
    lines = shown["entropy"].get_lines()
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 3


def test_a_report_by_layer_is_drawn_without_what_is_zero_throughout():
    rows = tuple(
        dict.fromkeys((column.name for column in LAYER_COLUMNS), 0)
        | {
            "site": f"encoder.self.{layer}",
            "stack": "encoder",
            "kind": "self",
            "layer": layer,
            "parameters": 10 + layer,
        }
        for layer in range(3)
    )
    shown = panels(head_pictures.head_picture(Table("inspect", LAYER_COLUMNS, rows, "site", ORIGIN))())
    assert list(shown) == ["parameters"]
    assert list(shown["parameters"].get_lines()[0].get_ydata()) == [10, 11, 12]


def test_what_cannot_be_drawn_is_known_from_the_columns():
    names = [column.name for column in HEAD_COLUMNS]
    assert not head_pictures.drawable([*names, "query_norm"]) and head_pictures.drawable([*names, "qk_rank"])
    assert not head_pictures.drawable(["model", "parameters", "macs_per_token"]), "one row for the model"
    table = heads(range(2), 2, columns=(Column("other", "1", "of a score that is not known here"),))
    assert head_pictures.head_picture(table) is None


def removal(**changes):
    blocks = {"encoder.self": [[Block(0), Block(1, stays=False), Block(3)], [], [Block(0, width=2), Block(2, width=2)]]}
    given = {"title": "t", "things": "head", "layers": blocks, "changes": (Change("parameters", 1000, 750),)}
    return Removal(**{**given, **changes})


def test_a_picture_of_a_removal_counts_what_stays():
    figure = removal_figure(removal(remarks=("held-out loss: 1 -> 2",)))
    shown = panels(figure)
    kept, gone = (found for found in shown["encoder.self"].collections if isinstance(found, PolyCollection))
    spans = [(round(min(x) + 0.44), round(max(x) + 0.56)) for x in (path.vertices[:, 0] for path in kept.get_paths())]
    assert spans == [(0, 1), (3, 4), (0, 2), (2, 4)] and len(gone.get_paths()) == 1
    assert texts(shown["encoder.self"]) == ["2 of 3", "2 of 4"], "a layer without heads has no count"
    (costs,) = (axes for axes in figure.axes if axes.get_xlabel().startswith("%"))
    assert texts(costs) == ["1,000 → 750 (-25.0%)"]
    assert [bar.get_width() for bar in costs.patches] == [100, 75]


def test_a_removal_of_many_layers_has_no_counts():
    rows = [[Block(index, stays=index % 3 > 0) for index in range(64)] for _ in range(80)]
    shown = panels(removal_figure(removal(layers={"decoder.causal": rows})))
    assert texts(shown["decoder.causal"]) == []
    assert [len(found.get_paths()) for found in shown["decoder.causal"].collections] == [80 * 42, 80 * 22]


def test_bars_of_models_say_their_numbers_and_what_is_missing():
    figure = bars_figure(
        ["a/b", "x" * 50], [Bars("loss", "nats", (0.5, math.nan)), Bars("n", "", (-1.0, 2.0))], title="t"
    )
    assert texts(panels_left(figure)["loss (nats)"]) == ["0.5", "not measured"]
    assert texts(panels_left(figure)["n"]) == ["-1", "2"]
    labels = [label.get_text() for label in panels_left(figure)["loss (nats)"].get_yticklabels()]
    assert labels[0] == "a/b" and labels[1].startswith("…") and len(labels[1]) == 28


def panels_left(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_title(loc="left")}


@pytest.mark.parametrize("speed", [False, True])
def test_the_picture_of_an_evaluation(speed):
    rows = [
        {"model": name, "loss": loss, "metric": 0.5, "metric_name": "accuracy", "divergence": 0.0, "parameters": count,
         "macs_per_token": 5, "kv_bytes_per_token": 0, "disk_bytes": 8, "examples": 7}
        for name, loss, count in (("one", 0.25, 1000), ("two", 0.5, 900))
    ]  # fmt: skip
    times = {"latency_iqr_ms": 1.0, "throughput": 3.0, "speedup": 2.0, "speedup_predicted": 1.5}
    if speed:
        rows = [row | times | {"batch_size": size, "latency_ms": 4.0 * size} for size in (1, 8) for row in rows]
    shown = panels_left(comparison_picture(Table("evaluate", columns_of(speed=speed), tuple(rows), "model", ORIGIN))())
    quantities = ["loss (nats)", "accuracy", "parameters", "macs_per_token", "disk_bytes"]
    assert list(shown) == quantities + ["latency, batch size 1 (ms)", "latency, batch size 8 (ms)"] * speed
    assert texts(shown["parameters"]) == ["1,000", "900 (-10.0%)"], "zero throughout is not drawn"
    if speed:
        assert texts(shown["latency, batch size 8 (ms)"]) == ["32", "32 (×2.00, predicted ×1.50)"]


def hostile(text):
    """Every new kind of picture with this text wherever text from outside can come."""
    table = heads(range(2), 2)
    rows = tuple({**row, "stack": text} for row in table.rows)
    origin = Provenance(text, data=text, examples=7)
    yield head_pictures.head_picture(Table("inspect", table.columns, rows, "head", origin))
    yield lambda: removal_figure(removal(title=text, layers={text: [[Block(0)]]}, remarks=(text,)))
    yield lambda: bars_figure([text], [Bars(text, text, (1.0,))], title=text)


def test_pictures_repeat_to_the_byte_and_take_any_text():
    text = "".join(HOSTILE)
    for first, second in zip(hostile(text), hostile(text), strict=True):
        for suffix in (".png", ".svg"):
            data = encoded(first, suffix)
            assert data == encoded(second, suffix)
            assert b"\x1b" not in data or suffix == ".png"


def test_a_picture_inside_a_page_has_no_text_and_no_address():
    for picture in hostile('</svg><script>alert(1)</script><img src="http://x" onerror=alert(1)>--><b>'):
        svg = inline_svg(picture)
        assert svg.startswith("<svg") and svg.endswith("</svg>") and svg.count("<svg") == 1
        assert not re.search(r"<script|<img|onerror|alert|://|<!|<\?", svg)
        links = re.findall(r'(?:href|src)="([^"]*)', svg)
        assert links and all(link.startswith(("#", "data:image/png;base64,")) for link in links)
