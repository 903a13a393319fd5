"""The HTML page in a browser: filters, links, error maps, keyboard, a phone's width, light and dark.

The page is opened in headless Chromium with a script at its end that does what a reader does and notes what it saw.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from conformance.report.html import render

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason="the page is not looked at: chromium is not installed (apt, or its site)"
    ),
]


def case(name, function, status="passed", **more):
    return {"id": name, "rules": ["layers-8"], "function": function, "dtype": "float32", "kernel": "auto",
            "status": status, "share": 0.25, "comparisons": 3, "detail": "", **more}  # fmt: skip


DOCUMENT = {
    "targets": {
        "core_numpy": {
            "cases": [case("attention-causal", "attention_with_lse"), case("relu", "relu"), case("silu", "silu")]
        },
        "mine": {
            "diagnosis": {
                "guesses": [
                    {
                        "fault": "relu-leaky",
                        "diagnosis": "it leaks",
                        "stands_for": "a leak",
                        "evidence": "Much.",
                        "explained": ["relu"],
                        "contradicted": [],
                    }
                ],
                "unexplained": [],
            },
            "cases": [
                case("attention-causal", "attention_with_lse", "not offered", detail="no function attention_with_lse"),
                case(
                    "relu",
                    "relu",
                    "failed",
                    detail="out must be exactly 0.0 at (0,); got 1.5 " + "and more " * 20,
                    errors={
                        "name": "out",
                        "shape": [2, 30, 3],
                        "pool": [2, 1],
                        "panels": [{"at": [1], "rows": [".5a", "9xf"] + ["..."] * 13}],
                    },
                ),
                case("silu", "silu", "known difference", detail="a reason"),
                case("gelu", "gelu", "not offered", detail="no function gelu"),
            ],
        },
    },
    "environment": {"python": "3.11", "targets": {"core_numpy": {"version": "2.4"}}},
}
READER = """
const seen = {};
const visible = () => [...document.querySelectorAll('.case')].filter(node => node.offsetParent !== null)
  .map(node => node.dataset.target + ' ' + node.querySelector('code').textContent);
const shown = () => document.getElementById('shown').textContent;
const type = (name, value) => { const field = document.getElementById('f-' + name); field.value = value;
  field.dispatchEvent(new Event('input', { bubbles: true })); };
seen.all = visible();
const fold = document.querySelector('details.idle'), above = node => node.getBoundingClientRect().top;
seen.first = above(document.querySelector('.verdict.bad')) < above(document.querySelector('.failures'))
  && above(document.querySelector('.failures')) < above(document.querySelector('.matrix'));
const row = fold.querySelector('td');
seen.folded = [row.textContent, row.checkVisibility()];
fold.querySelector('summary').focus();
seen.reached = document.activeElement === fold.querySelector('summary') && fold.querySelector('summary').tabIndex === 0;
fold.querySelector('summary').click();  // as Enter does on a summary
seen.unfolded = row.checkVisibility();
fold.open = false;
document.querySelector('a[data-target="mine"][data-function="relu"]').click();
seen.cell = visible(); seen.count = shown(); seen.chosen = document.getElementById('f-target').value;
document.querySelector('a[data-target="core_numpy"][data-feature="causal"]').click();
seen.feature = visible();
document.querySelector('#filters').reset();
setTimeout(() => {
  seen.cleared = shown();
  type('status', 'known difference'); seen.known = visible();
  type('status', ''); type('text', 'CAUSAL lse'); seen.text = visible();
  type('text', 'no such words'); seen.none = shown();
  type('text', '');
  const first = document.querySelector('.case summary');
  first.focus(); first.click(); seen.open = first.parentElement.open;
  seen.body = first.parentElement.querySelector('.detail').getBoundingClientRect().width > 0;
  seen.diagnosis = first.parentElement.querySelector('.verdict').textContent;
  const press = key => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  press('ArrowDown'); press('ArrowDown'); press('ArrowUp');
  seen.focus = visible()[[...document.querySelectorAll('.case summary')].indexOf(document.activeElement)];
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.dark = matchMedia('(prefers-color-scheme: dark)').matches;
  seen.back = getComputedStyle(document.body).backgroundColor;
  seen.colour = getComputedStyle(document.body).color;
  press('End'); seen.last = document.activeElement === [...document.querySelectorAll('.case summary')].at(-1);
  first.focus(); press('Escape'); seen.closed = !first.parentElement.open;
  press('/'); seen.search = document.activeElement.id;
  document.querySelector('table.failures a').click();
  let tries = 0;
  const timer = setInterval(() => {  // the browser follows the link when it comes to it
    const map = first.parentElement.querySelector('figure svg');
    const there = map && first.parentElement.open && document.activeElement === first;
    if (!there && ++tries < 40) return;
    clearInterval(timer);
    seen.linked = first.parentElement.open && document.activeElement === first;
    seen.squares = [...map.querySelectorAll('rect')].slice(0, 6).map(one => one.getAttribute('class') || '');
    seen.titles = [...map.querySelectorAll('title')].slice(0, 6).map(one => one.textContent);
    seen.label = map.getAttribute('aria-label');
    seen.mapped = map.getBoundingClientRect().width > 20 && getComputedStyle(map.querySelector('.over')).fill;
    seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
    const theme = document.getElementById('theme');
    theme.click(); theme.click(); seen.theme = theme.textContent;
    seen.chosen_back = getComputedStyle(document.body).backgroundColor;
    parent.document.body.setAttribute('data-seen', JSON.stringify(seen));
  }, 100);
});
"""


@cache
def read(*flags, width=None):
    """What the reader saw; width: that of a frame around the page, for phones are narrower than Chromium's window."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        page = render(conformance=DOCUMENT).replace("</body>", f"<script>{READER}</script></body>")
        (folder / "page.html").write_text(page)
        frame = (
            f'<body style="margin:0"><iframe src="page.html" style="width:{width}px;height:800px;border:0"></iframe>'
        )
        (folder / "frame.html").write_text(frame)
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
                   "--dump-dom", "--virtual-time-budget=8000", f"--user-data-dir={folder / 'profile'}", *flags,
                   "--allow-file-access-from-files",
                   (folder / ("frame.html" if width else "page.html")).as_uri()]  # fmt: skip
        environment = {**os.environ, "HOME": name}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))


def test_a_reader_filters_opens_and_walks_with_the_keyboard():
    seen = read("--window-size=1280,900")
    assert seen["all"][0] == "mine relu" and len(seen["all"]) == 7  # failures first
    assert seen["cell"] == ["mine relu"] and seen["count"] == "1 of 7 cases" and seen["chosen"] == "mine"
    assert seen["feature"] == ["core_numpy attention-causal"]
    assert seen["cleared"] == "7 of 7 cases" and seen["none"] == "0 of 7 cases"
    assert seen["known"] == ["mine silu"]
    assert seen["text"] == ["core_numpy attention-causal", "mine attention-causal"]
    assert seen["open"] and seen["body"] and seen["focus"] == seen["all"][1]
    assert seen["diagnosis"].strip() == "Diagnosis: it leaks. Much."
    assert seen["last"] and seen["closed"] and seen["search"] == "f-text"
    assert seen["overflow"] == 0 and not seen["dark"] and seen["back"] == "rgb(255, 255, 255)"


def test_what_is_wrong_is_on_top_and_what_nobody_offers_unfolds_by_keyboard():
    seen = read("--window-size=1280,900")
    assert seen["first"] and seen["folded"] == ["gelu", False] and seen["reached"] and seen["unfolded"]


def test_an_error_map_is_drawn_when_its_case_is_opened_by_a_link():
    seen = read("--window-size=1280,900")
    assert seen["linked"] and seen["mapped"] == "rgb(192, 57, 43)"
    assert seen["squares"] == ["", "in", "over", "in", "beyond", "over"]
    assert seen["titles"] == [
        "[0-1, 0]: equal", "[0-1, 1]: up to 60 % of the budget", "[0-1, 2]: up to 10 times the budget",
        "[2-3, 0]: up to 100 % of the budget", "[2-3, 1]: beyond measure", "[2-3, 2]: over 1e5 times the budget",
    ]  # fmt: skip
    assert seen["label"] == "3 of 45 squares over the budget"


def test_a_phone_in_the_dark_has_no_sideways_scroll():
    seen = read("--window-size=500,900", "--blink-settings=preferredColorScheme=0", width=360)
    assert seen["overflow"] == 0 and seen["wide"] == 0 and seen["dark"]
    assert seen["back"] == "rgb(20, 23, 26)" and seen["colour"] == "rgb(228, 231, 234)"


def test_a_button_chooses_light_or_dark():
    seen = read("--window-size=1280,900")
    assert not seen["dark"] and seen["theme"] == "dark" and seen["chosen_back"] == "rgb(20, 23, 26)"
