"""The documentation site, once `make docs` has built it: its links, and how Chromium shows it.

Without the site all tests are skipped; without Chromium and its driver (Debian: apt install
chromium chromium-driver) those of its look. Screenshots are written to build/screenshots.
"""

import base64
import html
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "docs"
PICTURES = ROOT / "build" / "screenshots"
PAGES = sorted(SITE.rglob("*.html"))
#: Pages with formulas, wide tables, long code, pictures and signatures.
SHOWN = ("index", "docs/attention", "docs/performance", "docs/speed", "docs/api/nn", "docs/api",
         "docs/course/additive", "bench/results/cpu-zen5-attention")  # fmt: skip
THEMES, WIDTHS = ("light", "dark"), (390, 1280)

pytestmark = pytest.mark.skipif(not PAGES, reason="there is no site: make docs")


def test_links_and_sources_are_local():
    """Links within the site lead to a page and an anchor; nothing is loaded from elsewhere."""
    texts = {page.resolve(): page.read_text() for page in PAGES}
    anchors = {page: set(re.findall(r' id="([^"]+)"', text)) for page, text in texts.items()}
    dead = set()
    for page, text in texts.items():
        assert re.findall(r'<(?:script|img|iframe|source)[^>]* src="(?:https?:)?//', text) == []
        assert re.findall(r'<link[^>]* href="(?:https?:)?//', text) == []
        for link in set(re.findall(r' (?:href|src)="([^"]+)"', text)):
            if re.match(r"https?:|data:|mailto:", link):
                continue
            path, _, anchor = urllib.parse.unquote(html.unescape(link)).partition("#")
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            found = target.exists()
            if found and anchor and target in anchors:
                found = anchor in anchors[target] or target.name in ("search.html", "genindex.html")
            if not found:
                dead.add((str(page.relative_to(SITE.resolve())), link))
    assert sorted(dead) == []
    styles = "\n".join(x.read_text() for x in SITE.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?https?://", styles) == []


class Browser:
    """A session of Chromium, by the WebDriver protocol."""

    def __init__(self, port: int, profile: Path):
        self.url = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                     "--disable-background-networking", f"--user-data-dir={profile}"]  # fmt: skip
        options = {"browserName": "chrome", "goog:chromeOptions": {"args": arguments}}
        answer = self("POST", "/session", capabilities={"alwaysMatch": options})
        self.url += f"/session/{answer['sessionId']}"

    def __call__(self, method: str, path: str, **body):
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self.url + path, data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"].partition("\n")[0]) from None

    def run(self, script: str):
        return self("POST", "/execute/sync", script=script, args=[])

    def show(self, page: str, theme: str, width: int, height: int = 900) -> None:
        """Open a page of the site."""
        for command, parameters in (
            ("Emulation.setDeviceMetricsOverride",
             {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}),
            ("Emulation.setEmulatedMedia",
             {"features": [{"name": "prefers-color-scheme", "value": theme}]}),
        ):  # fmt: skip
            self("POST", "/goog/cdp/execute", cmd=command, params=parameters)
        self("POST", "/url", url=(SITE / f"{page}.html").as_uri())

    def wait(self, script: str, good) -> list:
        """Run a script until its result is good, for a second at most, and return the last."""
        for _ in range(20):
            if good(found := self.run(script)):
                break
            time.sleep(0.05)
        return found

    def press(self, key: str) -> None:
        keys = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self("POST", "/actions", actions=[{"type": "key", "id": "keys", "actions": keys}])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = shutil.which("chromedriver")
    if program is None or shutil.which("chromium") is None:
        pytest.skip("there is no Chromium (Debian: apt install chromium chromium-driver)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([program, f"--port={port}", "--log-level=OFF"],
                          stdout=subprocess.DEVNULL) as driver:  # fmt: skip
        try:
            for _ in range(100):
                try:
                    session = Browser(port, tmp_path_factory.mktemp("profile"))
                    break
                except urllib.error.URLError:
                    time.sleep(0.1)
            yield session
            session("DELETE", "")
        finally:
            driver.terminate()


#: How far a page scrolls sideways, and elements that are too wide and not in a box that scrolls.
TOO_WIDE = """
const width = document.documentElement.clientWidth, found = [];
for (const x of document.querySelectorAll("article *")) {
  if (x.getBoundingClientRect().right <= width + 1) continue;
  let box = x;
  while (box.tagName !== "ARTICLE" && !["auto", "scroll"].includes(getComputedStyle(box).overflowX))
    box = box.parentElement;
  if (box.tagName === "ARTICLE") found.push(x.outerHTML.slice(0, 90));
}
return [document.scrollingElement.scrollWidth - width, found.slice(0, 5)];
"""
#: Texts whose contrast with their background is below that of WCAG 2.2, level AA.
PALE = """
const channels = x => x.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const [R, G, B] = [r, g, b].map(c => (c /= 255) <= .04 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
  return .2126 * R + .7152 * G + .0722 * B;
};
const behind = x => {
  for (; x; x = x.parentElement) {
    const c = channels(getComputedStyle(x).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c;
  }
  return [255, 255, 255];
};
const found = {};
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const x = texts.currentNode.parentElement, style = getComputedStyle(x);
  if (!texts.currentNode.data.trim() || !x.checkVisibility({visibilityProperty: true})) continue;
  if (x.closest("script, style, svg, .skip-to-content, [aria-hidden]")) continue;
  const a = light(channels(style.color)), b = light(behind(x)), size = parseFloat(style.fontSize);
  const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
  const large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
  if (ratio < (large ? 3 : 4.5))
    found[`${x.tagName}.${x.className} in ${x.parentElement.className}`] = ratio.toFixed(2);
}
return found;
"""
#: The element with the focus: its tag, its text, whether it is in view, and whether it is marked.
FOCUSED = """
const x = document.activeElement, box = x.getBoundingClientRect();
const shown = box.width > 0 && box.bottom > 0 && box.top < innerHeight && box.right > 0;
const styles = [x, ...x.labels || []].map(y => getComputedStyle(y)).filter(s => s.opacity > 0);
const ringed = styles.some(s => s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 1);
return [x.tagName, x.textContent.trim() || x.getAttribute("aria-label") || x.placeholder || "",
        shown, ringed];
"""


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", SHOWN)
def test_a_page(browser, page, width, theme):
    """No page scrolls sideways, every text has contrast, and formulas and pictures are drawn."""
    browser.show(page, theme, width)
    PICTURES.mkdir(exist_ok=True)
    picture = PICTURES / f"{page.replace('/', '-')}-{width}-{theme}.png"
    shot = browser("POST", "/goog/cdp/execute", cmd="Page.captureScreenshot", params={})
    picture.write_bytes(base64.b64decode(shot["data"]))
    assert browser.run(TOO_WIDE) == [0, []]
    assert browser.run(PALE) == {}
    for kind, good in (("math", "x.getBoundingClientRect().width > 0"),
                       ("img", "x.complete && x.naturalWidth > 0 && x.alt")):  # fmt: skip
        bad = (
            f"return [...document.querySelectorAll('article {kind}')].filter(x => !({good})).length"
        )
        assert browser.run(bad) == 0
    dark = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 100"
    assert browser.run(dark) == (theme == "dark")


def test_every_page_fits_a_telephone(browser):
    wide = {}
    for page in PAGES:
        name = str(page.relative_to(SITE).with_suffix(""))
        browser.show(name, "light", WIDTHS[0])
        if (found := browser.run(TOO_WIDE)) != [0, []]:
            wide[name] = found
    assert wide == {}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_keyboard(browser, width):
    """Tab soon reaches the skip link, and everything that it reaches is in view and marked."""
    tab, space, enter = "\ue004", " ", "\ue007"

    def next_focus() -> list:
        browser.run("window.last = document.activeElement")
        browser.press(tab)
        browser.wait("return document.activeElement !== window.last", bool)
        return browser.wait(FOCUSED, lambda x: x[2])  # what slides or scrolls into view

    browser.show("docs/attention", "light", width)
    reached = [next_focus() for _ in range(40)]
    assert [x for x in reached if x[0] != "BODY" and x[2:] != [True, True]] == []
    skip = [x[1] for x in reached].index("Skip to content")
    assert skip <= 2  # the drawers come first
    browser.show("docs/attention", "light", width)
    for _ in range(skip + 1):
        next_focus()
    browser.press(enter)
    browser.wait("return location.hash", bool)
    next_focus()
    assert browser.run("return document.activeElement.closest('.main') !== null")
    if width < 600:  # the drawer opens
        browser.show("docs/attention", "light", width)
        next_focus()
        browser.press(space)
        reached = [next_focus()[1] for _ in range(12)]
        assert "Install" in reached


def test_the_search(browser):
    """It works without a server."""
    browser.show("search", "light", 1280)
    browser("POST", "/url", url=f"{(SITE / 'search.html').as_uri()}?q=additive_attention")
    count = "return document.querySelectorAll('#search-results li').length"
    assert browser.wait(count, lambda x: x > 2) > 2
