"""The HTML page in a browser: filters, links from the matrix, keyboard, a phone's width, light and dark.

The page is opened in headless Chromium with a script at its end that does what a reader does and notes what it saw.
"""

import json
import os
import re
import shutil
import subprocess

import pytest

from conformance.report.html import render

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no chromium here")]


def case(name, function, status="passed", **more):
    return {"id": name, "rules": ["layers-8"], "function": function, "dtype": "float32", "kernel": "auto",
            "status": status, "share": 0.25, "comparisons": 3, "detail": "", **more}  # fmt: skip


DOCUMENT = {
    "targets": {
        "core_numpy": {
            "cases": [case("attention-causal", "attention_with_lse"), case("relu", "relu"), case("silu", "silu")]
        },
        "mine": {
            "cases": [
                case("attention-causal", "attention_with_lse", "not offered", detail="no function attention_with_lse"),
                case("relu", "relu", "failed", detail="out must be exactly 0.0 at (0,); got 1.5 " + "and more " * 20),
                case("silu", "silu", "known difference", detail="a reason"),
            ]
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
document.querySelector('a[data-target="mine"][data-function="relu"]').click();
seen.cell = visible(); seen.count = shown(); seen.chosen = document.getElementById('f-target').value;
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
  const press = key => document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  press('ArrowDown'); press('ArrowDown'); press('ArrowUp');
  seen.focus = visible()[[...document.querySelectorAll('.case summary')].indexOf(document.activeElement)];
  seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  seen.dark = matchMedia('(prefers-color-scheme: dark)').matches;
  seen.back = getComputedStyle(document.body).backgroundColor;
  seen.colour = getComputedStyle(document.body).color;
  document.body.setAttribute('data-seen', JSON.stringify(seen));
});
"""


def read(tmp_path, *flags):
    page = render(conformance=DOCUMENT).replace("</body>", f"<script>{READER}</script></body>")
    (tmp_path / "page.html").write_text(page)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom",
               "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}", *flags,
               (tmp_path / "page.html").as_uri()]  # fmt: skip
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))


def test_a_reader_filters_opens_and_walks_with_the_keyboard(tmp_path):
    seen = read(tmp_path, "--window-size=1280,900")
    assert seen["all"][0] == "mine relu" and len(seen["all"]) == 6  # failures first
    assert seen["cell"] == ["mine relu"] and seen["count"] == "1 of 6 cases" and seen["chosen"] == "mine"
    assert seen["cleared"] == "6 of 6 cases" and seen["none"] == "0 of 6 cases"
    assert seen["known"] == ["mine silu"]
    assert seen["text"] == ["core_numpy attention-causal", "mine attention-causal"]
    assert seen["open"] and seen["body"] and seen["focus"] == seen["all"][1]
    assert seen["overflow"] == 0 and not seen["dark"] and seen["back"] == "rgb(255, 255, 255)"


def test_a_phone_in_the_dark_has_no_sideways_scroll(tmp_path):
    seen = read(tmp_path, "--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    assert seen["overflow"] == 0 and seen["dark"]
    assert seen["back"] == "rgb(20, 23, 26)" and seen["colour"] == "rgb(228, 231, 234)"
