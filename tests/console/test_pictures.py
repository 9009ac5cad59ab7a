"""Pictures in the console's playground: a model that sees, whose engine is a fake."""

import asyncio
import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys

from servd.checkpoint.model_spec import ModelSpec, read_spec
from tests import vision_models
from tests.api.harness import Served, listening, serve
from tests.console.conftest import Page, browser
from tests.console.test_console import CATCH_DOWNLOADS, FILL, STORED, texts
from tests.limits import WAIT_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Pastes or drops a file, as a user would: arguments are the event, base64, name and type.
HAND_OVER = """
const [kind, data, name, type] = arguments;
const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
const files = new DataTransfer();
files.items.add(new File([bytes], name, { type }));
const init = { bubbles: true, cancelable: true };
const event = kind === "paste" ? new ClipboardEvent(kind, { ...init, clipboardData: files })
  : new DragEvent(kind, { ...init, dataTransfer: files });
document.querySelector(".composer textarea").dispatchEvent(event);
return event.defaultPrevented;
"""
SIZES = """return [...document.querySelectorAll('.turn .pictures img')].map(
  (e) => [e.naturalWidth, e.naturalHeight]);"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("smolvlm")
    vision_models.make("smolvlm", folder)
    return read_spec(folder)


def png(size: tuple[int, int], colour: str = "red") -> str:
    """Return a picture in base64."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def count_pictures(page: Page) -> int:
    """Return how many pictures requests have had."""
    metrics = httpx.get(f"{page.url}/metrics").text
    [count] = re.findall(r"^vllm:mm_cache_queries_total\{.*\} (\d+)", metrics, re.M)
    return int(count)


async def use(look: Callable[[Page, Served], None], **options: Any) -> None:
    """Have a browser look at a server."""

    def run(url: str) -> None:
        with browser(url) as page:
            page.open()
            page.wait(".settings")
            look(page, served)

    async with serve(script="red", **options) as served, listening(served.app) as url:
        await asyncio.to_thread(run, url)


async def test_pictures_are_pasted_dropped_chosen_and_sent(spec: ModelSpec, tmp_path: Path):
    file = tmp_path / "wide.png"
    file.write_bytes(base64.b64decode(png((2000, 500), "blue")))

    def look(page: Page, served: Served) -> None:
        for kind, colour in (("paste", "red"), ("drop", "green")):
            assert page.run(HAND_OVER, kind, png((40, 30), colour), "a.png", "image/png")
        page.wait('.bottom img[alt="Picture 2"]')
        page.all(".composer input")[0].send_keys(str(file))
        page.wait('.bottom img[alt="Picture 3"]')
        page.click('.bottom button[aria-label="Remove picture 2"]')
        assert len(page.all(".bottom img")) == 2
        assert page.run("return document.activeElement.ariaLabel") == "Remove picture 1"
        page.ask("What is it?")
        assert not page.all(".bottom img")
        assert page.run(SIZES) == [[40, 30], [1024, 256]]
        assert count_pictures(page) == 2
        # The picture that is small enough is sent as it is.
        [kept] = page.run(STORED)
        first, second, text = kept["messages"][0]["content"]
        assert first["image_url"]["url"] == f"data:image/png;base64,{png((40, 30))}"
        assert second["image_url"]["url"].startswith("data:image/jpeg;base64,")
        assert text == {"type": "text", "text": "What is it?"}
        for width in (390, 1280):
            page.emulate(width=width)
            assert page.run("return document.documentElement.scrollWidth") <= width
        page.check()

    await use(look, spec=spec)


async def test_a_conversation_keeps_its_pictures(spec: ModelSpec):
    def look(page: Page, served: Served) -> None:
        page.run(HAND_OVER, "drop", png((40, 30)), "a.png", "image/png")
        page.run(HAND_OVER, "drop", png((50, 60), "blue"), "a.png", "image/png")
        page.wait('.bottom img[alt="Picture 2"]')
        page.ask("What is it?")
        page.driver.refresh()
        page.wait(".assistant:has(footer)")
        assert page.run(SIZES) == [[40, 30], [50, 60]]
        page.run(CATCH_DOWNLOADS)
        page.click(".conversations .actions button", "Markdown")
        page.wait("main")
        [saved] = page.run("return new Promise((done) => setTimeout(() => done(saved), 500))")
        assert f"![Picture 1](data:image/png;base64,{png((40, 30))})\n\n" in saved
        page.click(".turn.user .actions button", "Edit")
        field = page.wait(".edit textarea")
        assert field.get_property("value") == "What is it?"
        page.click('.edit button[aria-label="Remove picture 1"]')
        field.send_keys(" Again?" + Keys.ENTER)
        page.wait(".turn.user .text", "Again?")
        page.wait(".assistant:last-of-type footer")
        assert page.run(SIZES) == [[50, 60]]
        assert texts(page, ".turn.user .text") == ["What is it? Again?"]
        page.click("footer button", "Try again")
        page.wait(".assistant:last-of-type footer button", "Timeline")
        assert count_pictures(page) == 2 + 1 + 1
        big = {"id": "full", "title": "big", "changed": 1, "messages": [], "x": "x" * 1_999_800}
        page.run(FILL, big)
        page.run(HAND_OVER, "paste", png((40, 30)), "a.png", "image/png")
        page.wait(".bottom img")
        page.wait(".composer textarea").send_keys(Keys.ENTER)  # without a word
        page.wait(".turn:nth-of-type(4) footer")
        assert count_pictures(page) == 4 + 2
        page.wait(".bottom .problem", "Delete one of them")
        page.check()

    await use(look, spec=spec)


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
async def test_what_is_no_picture_is_named(spec: ModelSpec, name: str):
    def look(page: Page, served: Served) -> None:
        data = base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg'/>").decode()
        kind = "image/svg+xml" if name.endswith("svg") else "image/png"
        page.run(HAND_OVER, "drop", data, name, kind)
        page.wait(".bottom .problem", f"{name} cannot be read here")
        page.run(HAND_OVER, "drop", png((9, 9)), "b.png", "image/png")
        page.wait(".bottom img")
        assert not texts(page, ".bottom .problem")

    await use(look, spec=spec)


async def test_a_text_model_says_that_it_reads_text_only():
    def look(page: Page, served: Served) -> None:
        page.wait(".empty")
        assert not texts(page, ".composer button[aria-label]")
        for kind in ("paste", "drop"):
            page.run(HAND_OVER, kind, png((40, 30)), "a.png", "image/png")
            page.wait(".bottom .problem", "This model reads text only")
        assert not page.all(".bottom img")
        page.check()

    await use(look)


async def test_the_keyboard_adds_and_removes_pictures(spec: ModelSpec):
    def look(page: Page, served: Served) -> None:
        page.run("HTMLInputElement.prototype.click = function () { window.opened = this.type; };")
        page.wait(".composer textarea").send_keys(Keys.TAB)
        page.wait(".composer button[aria-label='Add a picture']:focus").send_keys(Keys.ENTER)
        assert page.run("return window.opened") == "file"
        page.run(HAND_OVER, "drop", png((9, 9)), "b.png", "image/png")
        remove = page.wait(".bottom .pictures button", timeout=WAIT_SECONDS)
        remove.send_keys(Keys.ENTER)
        assert not page.all(".bottom img")
        page.wait(".composer button[aria-label='Add a picture']:focus")

    await use(look, spec=spec)
