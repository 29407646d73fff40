"""Chromium without a screen, by selenium: it reaches 127.0.0.1 and nothing else."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.waiting import LIMIT, wait_until

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --disable-dev-shm-usage"
).split()
FLAGS.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")


@contextmanager
def chromium(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A browser (selenium's driver); the test is skipped where Chromium, its driver or selenium is not installed."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("Chromium and its driver are not installed: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    browser.set_script_timeout(LIMIT)  # on a busy machine a page draws for longer than the usual 30 s
    browser.set_page_load_timeout(LIMIT)
    try:
        yield browser
    finally:
        browser.quit()


def errors(browser: Any) -> list[str]:
    """What the page has complained of since it was asked last."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def wait_for(browser: Any, script: str, right: Callable[[Any], object] = bool) -> Any:
    """What the JavaScript expression gives, once it is right."""
    seen: list[Any] = [None]

    def is_right() -> object:
        seen[0] = browser.execute_script(f"return {script}")
        return right(seen[0])

    wait_until(is_right, lambda: f"{script} is {seen[0]!r}; {errors(browser)}", every=0.1)
    return seen[0]
