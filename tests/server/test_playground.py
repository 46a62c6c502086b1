"""The page in a real browser: from a picture and a question to a comparison, and its faults."""

from __future__ import annotations

import ast
import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.pictures import make_picture
from tests.server.gate import Gate, gate_before
from tests.server.running import Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no browser: install one, on Debian with `apt install chromium`"
)

# As root and without a screen; nothing of the browser's own may go out.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WAIT = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """A new tab; at its end, nothing has failed in it and nobody else was asked."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(WAIT)
    complaints: list[str] = []
    hosts: set[str] = set()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if "Content" in said.text else 0)
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname or ""))
    yield page
    page.close()
    assert complaints == []
    assert hosts <= {"127.0.0.1", ""}  # "" is that of data: URLs


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "my picture.png"
    make_picture(400, 300, seed=3).save(path)
    return path


def open_page(page: Page, url: str) -> None:
    page.goto(f"{url}/playground")
    expect(page.locator("#server")).to_contain_text("msdg-vllm")


def ask(page: Page, picture: Path, question: str = "What is here?") -> None:
    page.set_input_files("#file", picture)
    page.fill("#question", question)
    page.click("#compare")
    expect(page.locator("#compare")).to_be_enabled(timeout=WAIT)


def set_slider(page: Page, place: int) -> None:
    page.locator("#retention").fill(str(place))


def test_two_clicks_give_a_comparison(page: Page, server: Server) -> None:
    open_page(page, server.url)
    page.click("#examples button >> nth=0")
    page.click("#compare")
    columns = page.locator(".column")
    expect(columns).to_have_count(2)
    expect(columns.nth(1).locator("canvas")).to_have_count(1, timeout=WAIT)
    expect(columns.nth(0)).to_contain_text("576 of 576")
    expect(columns.nth(1)).to_contain_text("64 of 576")
    for name in ("Prompt tokens", "Time to first token", "Total time"):
        expect(columns.nth(1)).to_contain_text(name)


def test_an_example_that_comes_slowly_is_waited_for(page: Page, server: Server) -> None:
    def slow(route: Route) -> None:
        time.sleep(1)
        route.continue_()

    open_page(page, server.url)
    page.route("**/examples/*.png", slow)
    page.click("#examples button >> nth=0")
    page.click("#compare")
    expect(page.locator("canvas")).to_have_count(1, timeout=WAIT)


def test_a_second_question_does_not_run_the_encoder(
    page: Page, server: Server, picture: Path
) -> None:
    open_page(page, server.url)
    ask(page, picture)
    ran = page.locator("tr:has-text('Vision encoder ran') td")
    expect(ran).to_have_text("yes")
    page.fill("#question", "And what else?")
    page.click("#compare")
    expect(ran).to_have_text("no, the picture was remembered", timeout=WAIT)


def test_the_slider_decides_how_much_is_kept(page: Page, server: Server, picture: Path) -> None:
    open_page(page, server.url)
    set_slider(page, 72)
    expect(page.locator("#retention-text")).to_contain_text("0.333")
    ask(page, picture)
    expect(page.locator(".column").nth(1)).to_contain_text("192 of 576")


def test_layers_and_patches_tell_what_was_decided(
    page: Page, server: Server, picture: Path
) -> None:
    open_page(page, server.url)
    ask(page, picture)
    canvas = page.locator("canvas")
    drawn = {}
    for layer in ("kept", "groups", "scores", "sinks", "none"):
        page.check(f"#layers input[value={layer}]")
        drawn[layer] = canvas.evaluate("canvas => canvas.toDataURL()")
    assert len(set(drawn.values())) >= 4  # this picture may have no sinks
    canvas.hover(position={"x": 5, "y": 5})
    caption = page.locator("figcaption").last
    expect(caption).to_contain_text("row 1, column 1")
    expect(caption).to_contain_text("rank")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    expect(caption).to_contain_text("row 1, column 2")


def test_methods_stand_side_by_side(page: Page, server: Server, picture: Path) -> None:
    open_page(page, server.url)
    page.click("summary:has-text('Methods')")
    page.check("#methods input[value=random]")
    page.check("#methods input[value=divprune]")
    ask(page, picture)
    titles = page.locator(".column h2").all_inner_texts()
    assert [title.split(",")[0] for title in titles] == ["All tokens", "msdg", "random", "divprune"]
    expect(page.locator("canvas")).to_have_count(3)


def test_several_pictures_go_into_one_question(page: Page, server: Server, picture: Path) -> None:
    open_page(page, server.url)
    page.set_input_files("#file", picture)
    page.click("#examples button >> nth=1")  # an example replaces what was there
    expect(page.locator("#chosen li")).to_have_count(1)
    ask(page, picture)
    expect(page.locator(".column").nth(1)).to_contain_text("128 of 1152")
    expect(page.locator("canvas")).to_have_count(2)


def test_a_dropped_picture_counts_as_a_chosen_one(page: Page, server: Server) -> None:
    open_page(page, server.url)
    page.evaluate(
        """async () => {
            const canvas = new OffscreenCanvas(64, 64);
            canvas.getContext("2d").fillRect(8, 8, 20, 20);
            const data = new DataTransfer();
            const blob = await canvas.convertToBlob();
            data.items.add(new File([blob], "dropped.png", {type: "image/png"}));
            document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true}));
        }"""
    )
    expect(page.locator("#chosen")).to_contain_text("dropped.png")


def test_the_link_holds_the_settings(page: Page, server: Server, browser: Browser) -> None:
    open_page(page, server.url)
    set_slider(page, 62)
    page.fill("#question", "Who is it?")
    link = page.evaluate(
        "() => import('./playground/settings.js').then(settings => settings.link())"
    )
    other = browser.new_page()
    other.goto(link)
    expect(other.locator("#retention-text")).to_contain_text("0.222")
    expect(other.locator("#question")).to_have_value("Who is it?")
    other.close()


QUESTION = 'What\'s "here", is it true, or null}, and $HOME? @@no@@'


@pytest.mark.parametrize("language", ["curl", "python", "javascript"])
def test_copied_code_runs_as_pasted(
    page: Page, server: Server, picture: Path, language: str
) -> None:
    open_page(page, server.url)
    ask(page, picture, QUESTION)
    page.click("#copy summary")
    page.check(f"#copy-tabs input[value={language}]")
    code = page.locator("#copy-text").inner_text()
    if language == "javascript":
        _assert_javascript_parses(code, picture.parent)
        return
    run = subprocess.run(
        ["bash", "-c", code] if language == "curl" else [sys.executable, "-c", code],
        cwd=picture.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout
    if language == "curl":
        body = json.loads(run.stdout)
        assert body["usage"]["prompt_tokens_details"]["visual_tokens"] == 64
        said = body["choices"][0]["message"]["content"]
    assert said.split()[:2] == _answered(page)[:2]


@pytest.mark.parametrize("size", [(400, 300), (900, 700)])
def test_copied_code_holds_what_was_asked(
    page: Page, server: Server, tmp_path: Path, size: tuple[int, int]
) -> None:
    # The larger one is too long to stand in the code, which then reads it.
    picture = tmp_path / 'it\'s a "noise".png'
    Image.effect_noise(size, 90).save(picture)
    open_page(page, server.url)
    page.set_input_files("#file", picture)
    page.fill("#question", QUESTION)
    codes = {
        language: page.evaluate(
            """language => Promise.all(["snippets", "media"].map(
                (name) => import(`./playground/${name}.js`))).then(([snippets, media]) =>
                    snippets.snippet(language, {model: "m", root: "r/m", items: media.items(),
                        question: document.getElementById("question").value,
                        fields: {retention: 0.5, pruning: {explain: true}}}))""",
            language,
        )
        for language in ("curl", "python", "offline")
    }
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    run = subprocess.run(
        ["bash", "-c", codes["curl"].rpartition("|\n")[0]],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    body = json.loads(run.stdout)
    assert body["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]
    for language, receiver in (("python", "create"), ("offline", "chat")):
        assert _called(codes[language], receiver, tmp_path) == body["messages"]
    assert "LLM('r/m')" in ast.unparse(ast.parse(codes["offline"]))


def _called(code: str, receiver: str, folder: Path) -> Any:
    """The messages that copied Python hands over; nobody is asked."""
    tree = ast.parse(code)
    names: dict[str, Any] = {}
    known = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    imports = "import base64\nfrom pathlib import Path\n"
    exec(imports + "\n".join(map(ast.unparse, known)), names)
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == receiver
    )
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    with contextlib.chdir(folder):
        return eval(ast.unparse(named.get("messages") or call.args[0]), names)


def _answered(page: Page) -> list[str]:
    """Words of the pruned answer as it came: the page also shows those it lacks."""
    pieces = page.locator(".column").nth(1).locator(".answer :not(del)")
    return " ".join(pieces.all_inner_texts()).split()


def _assert_javascript_parses(code: str, folder: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run JavaScript with")
    # The client itself would have to be installed; what is ours is the call.
    stub = "class OpenAI { constructor(options) { this.options = options; this.chat = {completions: {create: async (body) => { const r = await fetch(options.baseURL + '/chat/completions', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body)}); return r.json(); }}}; } }\n"  # noqa: E501
    (folder / "copied.mjs").write_text(code.replace('import OpenAI from "openai";', stub))
    run = subprocess.run(
        [node, "copied.mjs"], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


@pytest.fixture
def gate(server: Server) -> Iterator[Gate]:
    with gate_before(server.url) as gate:
        yield gate


def test_a_key_is_asked_for_and_a_wrong_one_is_said_to_be(
    page: Page, gate: Gate, picture: Path
) -> None:
    gate.key = "sesame"
    page.goto(f"{gate.url}/playground")
    page.fill("#key", "wrong")
    page.click("#key-dialog button")
    expect(page.locator("#key-problem")).to_have_text("The server did not take that key.")
    page.fill("#key", "sesame")
    page.click("#key-dialog button")
    expect(page.locator("#server")).to_contain_text("msdg-vllm")
    ask(page, picture)
    expect(page.locator("canvas")).to_have_count(1)


def test_a_busy_server_is_said_to_be_and_nothing_is_lost(
    page: Page, gate: Gate, picture: Path
) -> None:
    open_page(page, gate.url)
    gate.busy = True
    ask(page, picture, "Still here?")
    expect(page.locator("#problem")).to_have_text("The server is busy; try again in 7 s.")
    expect(page.locator("#question")).to_have_value("Still here?")
    expect(page.locator("#chosen li")).to_have_count(1)
    gate.busy = False
    page.click("#compare")
    expect(page.locator("canvas")).to_have_count(1, timeout=WAIT)
    expect(page.locator("#problem")).to_be_hidden()


def test_a_broken_picture_is_said_to_be(page: Page, server: Server, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\nno picture")
    open_page(page, server.url)
    ask(page, broken)
    expect(page.locator("#problem")).to_contain_text("an image cannot be loaded")


def test_a_file_that_is_no_picture_is_refused(page: Page, server: Server, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no picture")
    open_page(page, server.url)
    page.set_input_files("#file", text)
    expect(page.locator("#problem")).to_have_text("notes.txt is neither a picture nor a video.")


def test_a_very_large_picture_is_answered(page: Page, server: Server, tmp_path: Path) -> None:
    large = tmp_path / "large.jpg"
    Image.linear_gradient("L").resize((6000, 4000)).convert("RGB").save(large)
    open_page(page, server.url)
    ask(page, large)
    expect(page.locator("canvas")).to_have_count(1)


def test_the_page_fits_a_phone_and_the_dark(page: Page, server: Server, picture: Path) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme="dark")
    open_page(page, server.url)
    ask(page, picture)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(20, 24, 31)"


def test_every_control_has_a_name_for_a_screen_reader(page: Page, server: Server) -> None:
    open_page(page, server.url)
    nameless: list[Any] = page.evaluate(
        """() => [...document.querySelectorAll("input, select, textarea, button, canvas")]
            .filter((e) => e.offsetParent && !e.labels?.length && !e.ariaLabel
                           && !e.textContent.trim() && !e.querySelector("img[alt]"))
            .map((e) => e.outerHTML)"""
    )
    assert nameless == []


def test_nothing_but_the_page_itself_may_run_in_it(server: Server) -> None:
    policy = server.get("/playground").headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert server.get("/playground/../endpoint.py").status_code == 404
    assert server.get("/playground/nothing.js").status_code == 404


def test_the_examples_are_those_of_the_readme() -> None:
    root = Path(__file__).parents[2]
    for path in (root / "server/playground/page/examples").iterdir():
        assert path.read_bytes() == (root / "examples" / path.name).read_bytes()
    assert os.listdir(root / "server/playground/page/examples")
