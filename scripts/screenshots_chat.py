"""Pictures of the chat page in Chromium, for docs/pictures: desktop, dark, phone.

    artel serve FOLDER
    python scripts/screenshots_chat.py http://127.0.0.1:8000

The model answers three questions; give it one that can (SmolLM2-135M-Instruct made those that are there).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from screenshots import open_browser, save_picture, set_size

DESKTOP, PHONE = (1180, 800, 1.0, False), (390, 760, 2.0, True)
CONVERSATIONS = [
    ["What is the capital of France?", "And of Italy?"],
    ["Write a Python function that says whether a number is even. Show how it is called."],
]
SAMPLING = {"temperature": 0, "max_tokens": 250}
_IDLE = "return document.getElementById('stop').hidden && document.body.dataset.view === 'chat'"


def main(address: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        browser = open_browser(Path(folder))
        try:
            set_size(browser, DESKTOP)
            _open(browser, address, "light")
            for questions in CONVERSATIONS:
                browser.find_element("id", "new").click()
                for question in questions:
                    _ask(browser, question)
            _take(browser, "chat-page.png")
            _open(browser, address, "dark")
            _take(browser, "chat-page-dark.png")
            set_size(browser, PHONE)
            _open(browser, address, "light")
            _take(browser, "chat-page-phone.png")
        finally:
            browser.quit()


def _open(browser: Any, address: str, theme: str) -> None:
    browser.get(address)
    kept = {"artel.theme": theme, "artel.view": "chat", "artel.sampling": json.dumps(SAMPLING)}
    browser.execute_script("Object.assign(localStorage, arguments[0])", kept)
    browser.get(address)
    _wait(browser)


def _ask(browser: Any, question: str) -> None:
    browser.find_element("id", "input").send_keys(question)
    browser.find_element("id", "send").click()
    _wait(browser)


def _wait(browser: Any) -> None:
    while not browser.execute_script(_IDLE):
        time.sleep(0.1)


def _take(browser: Any, name: str) -> None:
    """From the beginning of the conversation."""
    browser.execute_script("document.activeElement.blur(); document.getElementById('messages').scrollTop = 0")
    save_picture(browser, name)


if __name__ == "__main__":
    main(sys.argv[1])
