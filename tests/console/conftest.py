"""A headless Chromium, and servers for it to look at."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.limits import WAIT_SECONDS

AXE = Path(__file__).parent / ".axe" / "axe.min.js"
PROGRAMS = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
# Kept in the page, for violations of its policy are not in its log.
LISTEN = """
addEventListener("securitypolicyviolation", (e) => (window.violations ??= []).push(e.blockedURI));
"""
RUN_AXE = """
const done = arguments[0];
axe.run().then((found) => done(found.violations), (error) => done([error.message]));
"""


class Page:
    """The console in a browser, as a user would handle it."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        self.num_clicks = 0
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": LISTEN})

    def open(self, view: str = "") -> None:
        """Load the page at a view, e.g. "live"."""
        self.driver.get("about:blank")  # a change after the # loads nothing
        self.driver.get(f"{self.url}/#/{view}" if view else f"{self.url}/")

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def wait(self, selector: str, text: str = "", timeout: float = WAIT_SECONDS) -> WebElement:
        """The first shown element that fits and has the text, waiting for it."""

        def find(_: object) -> WebElement | None:
            fitting = (e for e in self.all(selector) if e.is_displayed() and text in e.text)
            return next(fitting, None)

        missing = f"no {selector} with {text!r}"
        return WebDriverWait(self.driver, timeout, 0.05, ignored_exceptions=[Exception]).until(
            find, missing
        )

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element that `wait` finds; a list may be drawn anew meanwhile."""

        def try_to(_: object) -> bool:
            self.wait(selector, text).click()
            return True

        ignored = [StaleElementReferenceException]
        WebDriverWait(self.driver, 60, 0.05, ignored_exceptions=ignored).until(try_to)
        self.num_clicks += 1

    def ask(self, text: str) -> WebElement:
        """Send a message; return the answer once it has ended."""
        number = len(self.all(".assistant"))
        self.wait(".settings")
        self.wait(".composer textarea").send_keys(text + Keys.ENTER)
        return self.wait(f".assistant:nth-of-type({2 * number + 2}):has(footer)")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def emulate(self, *, dark: bool = False, width: int = 1280, height: int = 800) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def check(self) -> None:
        """No error was logged, no policy violated, and axe finds nothing."""
        errors = [entry for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert errors == []
        assert not self.run("return window.violations")
        if not AXE.exists():
            pytest.skip("there is no axe-core: tests/console/install.sh downloads it")
        self.run(AXE.read_text(encoding="utf8"))
        violations = self.driver.execute_async_script(RUN_AXE)
        assert violations == [], json.dumps(violations, indent=1)[:3000]


@contextmanager
def browser(url: str) -> Iterator[Page]:
    """A new Chromium without memory of others."""
    if missing := [name for name, path in PROGRAMS.items() if path is None]:
        pytest.skip(
            f"there is no {' and no '.join(missing)}: tests/console/install.sh installs them"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = PROGRAMS["chromium"] or ""
    for switch in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(PROGRAMS["chromedriver"])
    driver = webdriver.Chrome(options=options, service=service)
    try:
        page = Page(driver, url)
        page.emulate()
        yield page
    finally:
        driver.quit()
