"""The report in a real browser: no network, every figure drawn, reachable by keyboard and named for readers.

Chromium runs headless and is driven over its own debugging protocol. Skipped where there is none.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.test_writing import result
from tuning.report import write_report

websockets = pytest.importorskip("websockets.sync.client", reason="websockets is not installed")
START_S = 60


class Page:
    """One page of a browser."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv(timeout=START_S))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=9)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium on this machine")
    report = tmp_path_factory.mktemp("report") / "report.html"
    write_report(result(), report)
    profile = Path(tempfile.mkdtemp(prefix="dspark-browser-"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "--window-size=1280,900"]
    process = subprocess.Popen([program, *flags, "about:blank"], stderr=subprocess.DEVNULL)
    try:
        file = profile / "DevToolsActivePort"
        deadline = time.monotonic() + START_S
        while not file.exists() or not file.read_text().strip():
            assert process.poll() is None and time.monotonic() < deadline, "the browser did not come up"
            time.sleep(0.1)
        port = file.read_text().split()[0]
        (target,) = [t for t in httpx.get(f"http://127.0.0.1:{port}/json").json() if t["type"] == "page"]
        with websockets.connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            found = Page(socket)
            for domain in ("Page", "Network", "Log", "Runtime", "Accessibility"):
                found.call(f"{domain}.enable")
            found.call("Page.navigate", url=report.as_uri())
            deadline = time.monotonic() + START_S
            while found.value("document.readyState") != "complete" or not found.value(
                "document.querySelectorAll('.main-svg').length"
            ):
                assert time.monotonic() < deadline, "the page did not come up"
                time.sleep(0.2)
            yield found
    finally:
        process.terminate()
        process.wait(timeout=30)
        shutil.rmtree(profile, ignore_errors=True)


def test_nothing_is_fetched_and_nothing_fails(page: Page) -> None:
    asked = [
        event["params"]["request"]["url"]
        for event in page.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert asked and all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
    faults = [event for event in page.events if event.get("method") == "Runtime.exceptionThrown"]
    assert faults == []


def test_every_figure_is_drawn(page: Page) -> None:
    drawn = page.value(
        "Array.from(document.querySelectorAll('figure')).map(f => f.querySelectorAll('.main-svg').length > 0)"
    )
    assert len(drawn) >= 4 and all(drawn)


def test_the_page_fits_its_window(page: Page) -> None:
    """Wide tables scroll within themselves; the page never sideways."""
    for width in (1280, 400):
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
        )
        time.sleep(0.3)
        assert page.value("document.documentElement.scrollWidth") <= width
    page.call("Emulation.clearDeviceMetricsOverride")


def test_the_keyboard_reaches_every_table(page: Page) -> None:
    page.value("document.activeElement.blur()")
    reached = []
    for _ in range(60):
        page.press("Tab")
        reached.append(
            page.value(
                "(e => e.className === 'skip' ? 'skip' : e.getAttribute('aria-labelledby') || e.tagName)"
                "(document.activeElement)"
            )
        )
    assert reached[0] == "skip", "the first key leads past the contents"
    assert {"goals", "table", "frontier", "loads", "positions"} <= set(reached)


def test_a_screen_reader_is_told_what_everything_is(page: Page) -> None:
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]

    def named(role: str) -> list[str]:
        return [
            node.get("name", {}).get("value", "")
            for node in nodes
            if node.get("role", {}).get("value") == role and not node.get("ignored")
        ]

    assert named("main") and named("navigation") == ["Contents"]
    images = [name for name in named("image") + named("img") if name]
    assert len(images) >= 4 and all("Its numbers are in the table" in name for name in images[:4])
    assert all(named("region")), "every scrolling region has a name"
    assert "configuration" in named("columnheader") and "k5-greedy" in named("rowheader")
    assert page.value("document.documentElement.lang") == "en"
    levels = page.value("Array.from(document.querySelectorAll('h1,h2,h3')).map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1 and set(levels) <= {1, 2}


def test_every_link_has_its_place(page: Page) -> None:
    broken = page.value(
        "Array.from(document.querySelectorAll('a[href^=\"#\"]'))"
        ".map(a => a.getAttribute('href').slice(1)).filter(id => !document.getElementById(id))"
    )
    assert broken == []


def test_text_has_contrast(page: Page) -> None:
    """WCAG's 4.5 to 1 between each text and the background behind it."""
    worst = page.value(
        """(() => {
        const part = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
        const rgb = text => text.match(/[\\d.]+/g).map(Number);
        const behind = e => { for (; e; e = e.parentElement) {
            const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
            return [255, 255, 255]; };
        const all = document.querySelectorAll('h1,h2,p,td,th,dd,dt,li,caption,figcaption,a');
        return Math.min(...Array.from(all).filter(e => e.textContent.trim() && !e.closest('.skip')).map(e => {
            const a = light(rgb(getComputedStyle(e).color)), b = light(behind(e));
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); })); })()"""
    )
    assert worst >= 4.5
