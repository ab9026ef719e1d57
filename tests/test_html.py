"""The HTML page in a browser: it sorts and filters, nothing from the data runs, and no address is asked.

Chromium runs headless and is told nothing else; a page that it may not leave alone is opened beside the one under test,
so that a test which could not see a script or a request would fail.
"""

import base64
import hashlib
import html
import http.server
import json
import re
import shutil
import subprocess
import threading

import pytest
from report_samples import HOSTILE, report

from headscope.columns import Column
from headscope.provenance import Provenance
from headscope.reports import html as html_format
from headscope.reports._page import SCRIPT
from headscope.reports._plot import HeadPicture, HeatMap, head_figure
from headscope.tables import Table


@pytest.fixture(scope="module")
def chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here")
    return found


@pytest.fixture
def opened(chromium, tmp_path):
    """Opens pages in one start of the browser; gives the document of each, as it is after its scripts."""

    def dump(page):
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
        done = subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=2000", "--dump-dom", path.as_uri()],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert "<html" in done.stdout, done.stderr
        return done.stdout

    return dump


def driven(page, script):
    """The page with one more script, which its policy allows by digest; what it returns stands in the title."""
    script = f"document.title = JSON.stringify((() => {{{script}}})());"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src 'sha256-{digest}' ")
    return page.replace("</body>", f"<script>{script}</script></body>")


def said(document):
    """What the script returned."""
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", document, re.DOTALL)[1]))


ROWS = (
    ("decoder.causal.0.10", 10, 0.5, "first", True),
    ("decoder.causal.0.9", 9, 1e-5, "First one", False),
    ("decoder.causal.1.0", 0, None, "self", None),
    ("decoder.causal.1.1", 1, -2.0, None, True),
)
NAMES = ("head", "index", "importance", "role", "dead")


def small():
    rows = tuple(dict(zip(NAMES, row, strict=True)) for row in ROWS)
    return Table("inspect", tuple(Column(name, "1", f"what {name} is") for name in NAMES), rows, "head")


CLICKS = """
const order = () => [...document.querySelectorAll("#report tbody tr")].map(row => row.cells[1].textContent).join(" ");
const button = place => document.querySelectorAll("#report thead button")[place];
const found = [order()];
for (const place of [2, 2, 2, 0, 0, 4]) {
  button(place).click();
  found.push(`${order()} ${button(place).parentElement.getAttribute("aria-sort")}`);
}
return found;
"""
WORDS = ["", "first", "FIRST one", "index>=9", "index<2 dead=true", "importance<1e-4", "role=first", "role!=first",
         "importance>0", "nothing", "index=1", "n>1", "0.9"]  # fmt: skip
FILTERS = """
const find = document.getElementById("find"), found = {};
for (const words of WORDS) {
  find.value = words;
  find.dispatchEvent(new Event("input"));
  const shown = [...document.querySelectorAll("#report tbody tr")].filter(row => !row.hidden);
  found[words] = [shown.map(row => row.cells[1].textContent).join(" "), document.getElementById("count").textContent];
}
return found;
""".replace("WORDS", json.dumps(WORDS))


def test_a_click_sorts_and_words_filter(opened):
    page = html_format.render(small()).decode()
    document = opened(driven(page, f"return [(() => {{{CLICKS}}})(), (() => {{{FILTERS}}})()];"))
    clicks, filters = said(document)
    assert clicks == [
        "10 9 0 1",
        "10 9 1 0 descending",  # numbers begin with the largest; what was not measured is last
        "1 9 10 0 ascending",
        "10 9 0 1 none",
        "9 10 0 1 ascending",  # head 0.9 stands before 0.10
        "1 0 10 9 descending",
        "9 10 1 0 ascending",
    ]
    assert {words: found for words, (found, _) in filters.items()} == {
        "": "9 10 1 0", "first": "9 10", "FIRST one": "9", "index>=9": "9 10", "index<2 dead=true": "1",
        "importance<1e-4": "9 1", "role=first": "10", "role!=first": "9 0", "importance>0": "9 10", "nothing": "",
        "index=1": "1", "n>1": "", "0.9": "9",
    }  # fmt: skip
    assert filters["index>=9"][1] == "2 of 4 rows"


def hostile_page(payload):
    """A report with a picture and the payload wherever text from outside stands."""
    origin = Provenance(payload, revision=payload, data=payload, examples=3)
    table = report([payload, *HOSTILE])
    columns = (*table.columns[:-1], Column("token", payload, payload, payload))
    table = Table(payload, columns, table.rows, "head", origin, (payload,))
    shown = HeadPicture(payload, HeatMap({payload: [[1.0, 2.0]]}, payload, payload, payload))
    return html_format.render(table, lambda: head_figure(shown)).decode()


@pytest.fixture
def server():
    """Counts the requests that it gets."""

    class Counting(http.server.BaseHTTPRequestHandler):
        asked = []  # noqa: RUF012

        def do_GET(self):  # noqa: N802
            self.asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *words):
            pass

    Counting.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counting) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_no_script_from_data_runs_and_no_address_is_asked(opened, server):
    address = f"http://127.0.0.1:{server.server_port}"
    mark = "document.documentElement.dataset.ran=1"
    payload = (
        f"</script></title></style></svg>--><img src={address}/img onerror={mark}><script>{mark}</script>"
        f"<iframe src={address}/frame></iframe><link rel=stylesheet href={address}/css>\"'"
    )
    page, asked = hostile_page(payload), server.RequestHandlerClass.asked
    assert page.count("&lt;img") > 5
    document = opened(page)
    assert "data-ran" not in document and asked == []
    assert document.count("<tr") == len(HOSTILE) + 2, "the page is whole"
    raw = page.replace("<h1>", f"<h1>{payload}", 1)
    blocked = opened(raw)
    assert "<iframe" in blocked and "data-ran" not in blocked and asked == [], "the policy is a second wall"
    let = opened(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", raw))
    assert "data-ran" in let and {"/img", "/frame", "/css"} <= set(asked), "without both walls it would be seen"


def test_the_policy_allows_the_page_its_own_script():
    page = html_format.render(report(["x"])).decode()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert script == SCRIPT
    assert f"default-src &#39;none&#39;; script-src &#39;sha256-{digest}&#39;;" in page


def test_the_picture_stands_in_the_page():
    assert "<svg" not in html_format.render(report(["x"])).decode()
    page = hostile_page("plain")
    assert page.count("<svg") == page.count("</svg>") == 1
    assert "://" not in page.replace("http://example.org/x.png", "")


@pytest.mark.parametrize(
    "origin, said",
    [
        (Provenance("m"), "m"),
        (Provenance("m", examples=1), "m on one example"),  # of --text
        (Provenance("m", examples=2000, data="d.csv"), "m on 2,000 examples of d.csv"),
    ],
)
def test_the_page_says_what_was_measured_on_what(origin, said):
    table = Table("map", (Column("attention", "share", "how much"),), ({"attention": 1.0},), "", origin)
    assert f">{said}<" in html_format.render(table).decode()
