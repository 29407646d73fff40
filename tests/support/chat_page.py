"""The chat page in Chromium: what its tests see and do, and a model that knows a few conversations by heart."""

import json
from pathlib import Path

from support.browser import errors, wait_for
from support.runs import artel, write_run

ATTACK = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
CODE = (
    "Here:\n\n```html\n<b>bold</b>\n\n<script>alert(1)</script>\n```\n\n- one\n- **two** [link](https://example.com/)"
)
TALKS = [
    [("user", "Who are you?"), ("assistant", "I am a *tiny* model.")],
    [("system", "Speak Russian."), ("user", "Who are you?"), ("assistant", "Я маленькая модель.")],
    [("user", "Attack"), ("assistant", ATTACK)],
    [("user", "Show code"), ("assistant", CODE)],
    [("user", "I am Ann."), ("assistant", "Hello, Ann!"), ("user", "My name?"), ("assistant", "Ann.")],
    [("user", "My name?"), ("assistant", "I do not know.")],
]
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 1024}
IDLE = "document.getElementById('stop').hidden && document.body.dataset.view === 'chat'"
SHOWN = """return [...document.querySelectorAll('.message')].map((message) =>
  [message.classList.contains('user') ? 'user' : 'assistant', message.querySelector('.body').innerText.trim()])"""


def trained_talker(folder: Path) -> Path:
    """A model that artel taught `TALKS` by heart, among them one whose answer is HTML that would run."""
    rows = [{"messages": [{"role": role, "content": content} for role, content in talk]} for talk in TALKS]
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 8))
    source = {"path": str(folder / "talks.jsonl"), "format": "chat"}
    run = write_run(
        folder / "talker.yaml", objective="chat", tokenizer={"train": {"vocab": 360}},
        data={"sources": [source], "block": 256, "validation": 0, "dedup": {"exact": False}},
        model={"config": {**GPT2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}},
        train={"steps": 150, "batch": 8, "learning_rate": 5e-3, "warmup": 5},
    )  # fmt: skip
    done = artel("train", run)
    assert done.returncode == 0, done.stderr
    return folder / "talker"


def fresh(browser, address, view="chat", **kept):
    """The page as a new user sees it, apart from what is `kept` in the browser."""
    browser.get(address)
    settings = {"artel.sampling": json.dumps({"temperature": 0})} | kept
    browser.execute_script(
        "localStorage.clear(); sessionStorage.clear(); Object.assign(localStorage, arguments[0])", settings
    )
    browser.get(address)
    wait_for(browser, "document.body.dataset.view", lambda shown: shown == view)
    errors(browser)
    return browser


def find(browser, selector):
    return browser.find_element("css selector", selector)


def all_of(browser, selector):
    return browser.find_elements("css selector", selector)


def send(browser, text, wait=True):
    from selenium.webdriver import Keys

    find(browser, "#input").send_keys(text, Keys.ENTER)
    if wait:
        wait_for(browser, IDLE)


def shown(browser):
    """[role, text] of each message on the screen."""
    return browser.execute_script(SHOWN)


def press(browser, message, word):
    """Click the button with this word at a message, counted from the first or, if negative, from the last."""
    buttons = all_of(all_of(browser, ".message")[message], ".actions button")
    next(button for button in buttons if button.text == word).click()


def titles(browser):
    return [title.text for title in all_of(browser, "#conversations .title")]


def open_titled(browser, title):
    next(each for each in all_of(browser, "#conversations .title") if each.text == title).click()


def imported(browser, folder, *rows):
    file = folder / "import.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = len(titles(browser))
    find(browser, "#file").send_keys(str(file))
    wait_for(browser, "document.querySelectorAll('#conversations li').length", lambda count: count > before)
    all_of(browser, "#conversations .title")[0].click()
