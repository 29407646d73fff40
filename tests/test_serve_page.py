"""The chat page in Chromium, by the real server: tiny models that artel trained, their answers on the screen."""

import json
import re
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.browser import chromium, errors, wait_for
from support.objectives import objective_run
from support.reading import items
from support.runs import artel, write_run
from support.serving import server_of
from support.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

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


@pytest.fixture(scope="module")
def talker(tmp_path_factory) -> Path:
    """A model that artel taught a few conversations by heart, among them one whose answer is HTML that would run."""
    folder = tmp_path_factory.mktemp("talker")
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


@pytest.fixture(scope="module")
def address(talker):
    with server_of(talker) as server:
        yield server.url


@pytest.fixture(scope="module")
def crowded(endless):
    """The server of a model that never ends a text, with one place and no queue."""
    with server_of(endless, "--requests", "1", "--queue", "0") as server:
        yield server.url


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


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


@pytest.fixture
def page(browser, address):
    yield fresh(browser, address)
    assert errors(browser) == []


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


# A conversation -------------------------------------------------------------------


def test_a_conversation(page):
    """The second answer depends on what was said before; what the request took is told."""
    send(page, "I am Ann.")
    send(page, "My name?")
    assert shown(page) == [
        ["user", "I am Ann."], ["assistant", "Hello, Ann!"], ["user", "My name?"], ["assistant", "Ann."]
    ]  # fmt: skip
    assert re.fullmatch(r"tokens: \d+ · [\d.]+ tokens/s · \d+ of 1,024 tokens of context", find(page, "#info").text)
    assert titles(page) == ["I am Ann."]
    find(page, "#new").click()
    send(page, "My name?")
    assert shown(page) == [["user", "My name?"], ["assistant", "I do not know."]]


def test_enter_sends_and_shift_enter_begins_a_line(page):
    from selenium.webdriver import Keys

    field = find(page, "#input")
    field.send_keys("Who are", Keys.SHIFT + Keys.ENTER + Keys.NULL, "you?")
    assert field.get_attribute("value") == "Who are\nyou?"
    assert shown(page) == []
    field.send_keys(Keys.ENTER)
    wait_for(page, IDLE)
    assert shown(page)[0] == ["user", "Who are\nyou?"]


def test_the_system_prompt_and_the_sampling_settings_reach_the_model(page):
    find(page, "#open-settings").click()
    find(page, "#system").send_keys("Speak Russian.")
    assert find(page, "#temperature").get_attribute("value") == "0"
    find(page, "#max_tokens").send_keys("300")
    find(page, "#close-settings").click()
    send(page, "Who are you?")
    assert shown(page)[-1] == ["assistant", "Я маленькая модель."]
    find(page, "#new").click()
    find(page, "#open-settings").click()
    assert find(page, "#system").get_attribute("value") == "Speak Russian."
    find(page, "#system").clear()
    find(page, "#max_tokens").clear()
    find(page, "#max_tokens").send_keys("2")
    find(page, "#close-settings").click()
    send(page, "Who are you?")
    assert "Raise max tokens in the settings" in find(page, ".note").text
    assert find(page, "#info").text.startswith("tokens: 2 ")
    find(page, "#open-settings").click()
    find(page, "#defaults").click()
    find(page, "#close-settings").click()
    assert page.execute_script("return localStorage['artel.sampling']") == "{}"


def test_an_answer_is_given_anew_and_the_one_before_stays(page):
    send(page, "I am Ann.")
    send(page, "My name?")
    press(page, 1, "Regenerate")
    wait_for(page, IDLE)
    assert shown(page) == [["user", "I am Ann."], ["assistant", "Hello, Ann!"]]
    message = all_of(page, ".message")[1]
    assert "2 / 2" in message.text
    find(message, "button[aria-label='Previous version']").click()
    assert [text for _, text in shown(page)] == ["I am Ann.", "Hello, Ann!", "My name?", "Ann."]


def test_what_follows_an_edited_message_is_answered_anew(page):
    from selenium.webdriver import Keys

    send(page, "I am Ann.")
    send(page, "My name?")
    press(page, 0, "Edit")
    field = find(page, ".editing textarea")
    field.send_keys("nonsense", Keys.ESCAPE)
    assert shown(page)[0] == ["user", "I am Ann."]
    press(page, 0, "Edit")
    field = find(page, ".editing textarea")
    field.clear()
    field.send_keys("Who are you?", Keys.ENTER)
    wait_for(page, IDLE)
    assert shown(page) == [["user", "Who are you?"], ["assistant", "I am a tiny model."]]
    find(page, "button[aria-label='Previous version']").click()
    assert [text for _, text in shown(page)] == ["I am Ann.", "Hello, Ann!", "My name?", "Ann."]


def test_copied_is_what_the_model_wrote(page):
    page.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    send(page, "Show code")
    read = "return await navigator.clipboard.readText()"
    press(page, 1, "Copy")
    wait_for(page, "[...document.querySelectorAll('.actions button')].some((each) => each.textContent === 'Copied')")
    assert page.execute_script(read) == CODE
    find(page, ".code button").click()
    wait_for(page, "document.querySelector('.code button').textContent === 'Copied'")
    assert page.execute_script(read) == "<b>bold</b>\n\n<script>alert(1)</script>"


# A model's answer is never HTML ---------------------------------------------------


def test_html_in_an_answer_is_text(page):
    send(page, "Attack")
    assert shown(page)[-1] == ["assistant", ATTACK]
    assert all_of(page, "#messages img, #messages script") == []
    page.refresh()
    wait_for(page, IDLE)
    assert shown(page)[-1] == ["assistant", ATTACK]
    assert page.title == "artel"


def test_html_of_the_user_and_of_a_file_is_text(page, tmp_path):
    send(page, ATTACK)
    assert shown(page)[0] == ["user", ATTACK]
    assert titles(page) == [ATTACK[:60].strip()]
    imported(
        page, tmp_path, {"messages": [{"role": "user", "content": ATTACK}, {"role": "assistant", "content": ATTACK}]}
    )
    assert page.execute_script("return document.querySelectorAll('main img, main script, aside img').length") == 0
    assert page.title == "artel"


def test_code_is_shown_as_it_is(page):
    send(page, "Show code")
    body = all_of(page, ".message .body")[1]
    assert find(body, "pre code").text == "<b>bold</b>\n\n<script>alert(1)</script>"
    assert find(body, "figcaption span").text == "html"
    assert [item.text for item in all_of(body, "li")] == ["one", "two link"]
    assert find(body, "strong").text == "two"
    link = find(body, "a")
    assert [link.get_attribute(name) for name in ("href", "rel", "target")] == [
        "https://example.com/", "noopener noreferrer", "_blank"
    ]  # fmt: skip


def test_the_browser_refuses_what_would_slip_through(page):
    """The Content-Security-Policy: no code in the HTML, nothing from elsewhere."""
    page.execute_script("""
        const script = document.createElement('script');
        script.textContent = "document.title = 'taken'";
        const image = document.createElement('img');
        image.setAttribute('onerror', "document.title = 'taken'");
        image.src = 'http://127.0.0.1:1/x.png';
        window.refused = [];
        addEventListener('securitypolicyviolation', (event) => window.refused.push(event.effectiveDirective));
        document.body.append(script, image);
    """)
    wait_for(page, "window.refused", lambda seen: {"img-src", "script-src-elem", "script-src-attr"} <= set(seen))
    assert page.title == "artel"
    errors(page)  # the refusals


MARKDOWN = {
    "a **b *c* d** e": "<p>a <strong>b <em>c</em> d</strong> e</p>",
    "***both***": "<p><em><strong>both</strong></em></p>",
    "snake_case_name 2 * 3 * 4": "<p>snake_case_name 2 * 3 * 4</p>",
    "~~gone~~ `a <b>` \\*no\\*": "<p><del>gone</del> <code>a &lt;b&gt;</code> *no*</p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# Title #\ntext": "<h3>Title</h3><p>text</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "1. a\n   - b\n   - [x] c\n2. d": '<ol start="1"><li>a<ul><li>b</li><li>☑ c</li></ul></li><li>d</li></ol>',
    "3) a\n\n4) b": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>',
    "- a\n\ntext": "<ul><li>a</li></ul><p>text</p>",
    "a\n\n---\nb": "<p>a</p><hr><p>b</p>",
    "[x](javascript:alert(1)) [y](data:text/html,z) [z](/v1)":
        "<p>[x](javascript:alert(1)) [y](data:text/html,z) [z](/v1)</p>",
    "\\(a_1 * b_2 * c\\)": "<p>\\(a_1 * b_2 * c\\)</p>",
    "<b>x</b> & &lt;": "<p>&lt;b&gt;x&lt;/b&gt; &amp; &amp;lt;</p>",
    "**open": "<p>**open</p>",
    "«**жирный**» текст": "<p>«<strong>жирный</strong>» текст</p>",
    "|a|b|\n|:-:|--:|\n|`x|y`|\\||": '<div class="scroll" tabindex="0"><table><thead><tr><th class="center">a</th>'
        '<th class="end">b</th></tr></thead><tbody><tr><td class="center"><code>x|y</code></td><td class="end">|</td>'
        "</tr></tbody></table></div>",
}  # fmt: skip
LINKS = {
    "[a](https://e.org/x_(y) 't')": [["a", "https://e.org/x_(y)"]],
    "see https://e.org/a?b=1. And <http://e.org/>": [["https://e.org/a?b=1"] * 2, ["http://e.org/"] * 2],
    "[https://e.org](https://evil.org) ![pic](https://e.org/p.png)": [
        ["https://e.org", "https://evil.org/"], ["pic", "https://e.org/p.png"]
    ],
    "[a [b](https://e.org/1) c](https://e.org/2": [["b", "https://e.org/1"], ["https://e.org/2"] * 2],
    "[x](HTTPS://E.org) [y](ftp://e.org) [z](https://)": [["x", "https://e.org/"]],
}  # fmt: skip
RENDER = """
const { showMarkdown } = await import('/page/markdown.js');
return arguments[0].map((text) => {
  const box = document.createElement('div');
  showMarkdown(box, text);
  return RESULT;
});
"""


def rendered(page, texts, result):
    """What the page's Markdown makes of each text."""
    return page.execute_script(RENDER.replace("RESULT", result), list(texts))


def test_markdown(page):
    assert dict(zip(MARKDOWN, rendered(page, MARKDOWN, "box.innerHTML"), strict=True)) == MARKDOWN
    links = "[...box.querySelectorAll('a')].map((link) => [link.textContent, link.href])"
    assert dict(zip(LINKS, rendered(page, LINKS, links), strict=True)) == LINKS


def test_an_answer_in_the_midst_of_a_stream_looks_as_far_as_it_goes(page):
    """Shown piece by piece it ends as it does shown at once; an open fence is code already."""
    whole = "\n\n".join(
        [*MARKDOWN, *LINKS, "```python\nif a < b:\n\n    pass\n```", "- a\n  ```\n  b\n  ```\n- c", "end"]
    )
    same = page.execute_script(
        """
        const { showMarkdown } = await import('/page/markdown.js');
        const [piecewise, atOnce] = [document.createElement('div'), document.createElement('div')];
        const [text] = arguments;
        for (let end = 0; end <= text.length; end += 3) showMarkdown(piecewise, text.slice(0, end));
        showMarkdown(piecewise, text);
        showMarkdown(atOnce, text);
        return [piecewise.innerHTML === atOnce.innerHTML, atOnce.textContent.length];
        """,
        whole,
    )
    assert same[0]
    assert same[1] > 300
    (open_fence,) = rendered(page, ["a\n```js\nx **y**"], "box.querySelector('pre code').textContent")
    assert open_fence == "x **y**"
    kept = page.execute_script("""
        const { showMarkdown } = await import('/page/markdown.js');
        const box = document.createElement('div');
        showMarkdown(box, 'first\\n\\nsec');
        const first = box.firstChild;
        showMarkdown(box, 'first\\n\\nsecond');
        return [box.firstChild === first, box.textContent];
    """)
    assert kept == [True, "firstsecond"]


def test_no_text_makes_the_page_deep_or_loses_a_letter(page):
    """What nests without end, or opens and never closes: work that grew with its square would not end here."""
    many = 30_000
    parts = [
        "*",
        "*a ",
        "a* ",
        "[",
        "[a](",
        "`` ` ",
        "> ",
        "- ",
        "\\",
        "_a",
        "a|b\n-|-\n",
        "<http://",
        "***a",
        "```\n",
        "~~a ",
    ]
    texts = [part * (many // len(part)) for part in parts]
    texts.append("\n".join("  " * depth + "- x" for depth in range(400)))
    depth = "(function deep(node) { return 1 + Math.max(0, ...[...node.children].map(deep)); })(box)"
    assert max(rendered(page, texts, depth)) < 100
    letters = "box.textContent.split('a').length"
    assert rendered(page, ["*a " * many], letters) == [many + 1]


# In the browser -------------------------------------------------------------------


def test_a_reload_keeps_the_history(page):
    send(page, "I am Ann.")
    send(page, "My name?")
    find(page, "#new").click()
    send(page, "Who are you?")
    before = shown(page)
    assert before == [["user", "Who are you?"], ["assistant", "I am a tiny model."]]
    page.refresh()
    wait_for(page, IDLE)
    assert shown(page) == before
    assert titles(page) == ["Who are you?", "I am Ann."]
    all_of(page, "#conversations .title")[1].click()
    assert [text for _, text in shown(page)] == ["I am Ann.", "Hello, Ann!", "My name?", "Ann."]
    send(page, "My name?")
    assert titles(page) == ["I am Ann.", "Who are you?"]


def test_a_conversation_is_renamed_and_deleted(page):
    from selenium.webdriver import Keys

    send(page, "Who are you?")
    find(page, "#conversations li.current button[aria-label^='Rename']").click()
    field = find(page, "#ask-value")
    field.clear()
    field.send_keys("Ours", Keys.ENTER)
    wait_for(page, "document.querySelector('#conversations .title').textContent", lambda title: title == "Ours")
    delete = "#conversations li.current button[aria-label='Delete “Ours”']"
    find(page, delete).click()
    find(page, "#ask-no").click()
    assert titles(page) == ["Ours"]
    find(page, delete).click()
    find(page, "#ask-yes").click()
    wait_for(page, "document.querySelectorAll('#conversations li').length === 0")
    assert shown(page) == []
    assert page.execute_script("return Object.keys(localStorage).filter((key) => key.includes('conversation'))") == []


def imported(browser, folder, *rows):
    file = folder / "import.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = len(titles(browser))
    find(browser, "#file").send_keys(str(file))
    wait_for(browser, "document.querySelectorAll('#conversations li').length", lambda count: count > before)
    all_of(browser, "#conversations .title")[0].click()


def test_what_is_exported_is_what_format_chat_reads_and_comes_back(page, tmp_path):
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    find(page, "#open-settings").click()
    find(page, "#system").send_keys("Speak Russian.")
    find(page, "#close-settings").click()
    send(page, "Who are you?")
    find(page, "#export").click()
    file = tmp_path / "conversations.jsonl"
    wait_until(file.exists, lambda: list(tmp_path.iterdir()))
    said = [
        ("system", "Speak Russian."), ("user", "Who are you?"), ("assistant", "Я маленькая модель.")
    ]  # fmt: skip
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"messages": [{"role": role, "content": content} for role, content in said]}
    ]
    (record,) = items(file, format="chat")
    assert [(message.role, message.content) for message in record.fields.messages] == said
    find(page, "#delete-all").click()
    find(page, "#ask-yes").click()
    wait_for(page, "document.querySelectorAll('#conversations li').length === 0")
    find(page, "#file").send_keys(str(file))
    wait_for(page, "document.querySelectorAll('#conversations li').length === 1")
    find(page, "#conversations .title").click()
    assert shown(page) == [["user", "Who are you?"], ["assistant", "Я маленькая модель."]]
    find(page, "#open-settings").click()
    assert find(page, "#system").get_attribute("value") == "Speak Russian."
    find(page, "#close-settings").click()


def test_a_bad_line_of_a_file_is_named(page, tmp_path):
    file = tmp_path / "talks.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}]}
    lines = [json.dumps(good), "nonsense", json.dumps({"messages": [{"role": "robot", "content": "a"}]}), "[]"]
    file.write_text("\n".join(lines))
    find(page, "#file").send_keys(str(file))
    text = wait_for(page, "document.getElementById('status').innerText", lambda text: "imported" in text)
    assert text.startswith("Conversations imported: 1.")
    assert [f"talks.jsonl: Line {line} is not a conversation" in text for line in (1, 2, 3, 4)] == [
        False,
        True,
        True,
        True,
    ]


def test_another_tab_sees_what_is_said(page, address):
    send(page, "I am Ann.")
    first = page.current_window_handle
    page.switch_to.new_window("tab")
    try:
        page.get(address)
        wait_for(page, IDLE)
        assert shown(page)[-1] == ["assistant", "Hello, Ann!"]
        send(page, "My name?")
        page.close()
    finally:
        page.switch_to.window(first)
    wait_for(page, "document.querySelectorAll('.message').length === 4")
    assert shown(page)[-1] == ["assistant", "Ann."]


def test_a_full_storage_is_told(page):
    send(page, "Who are you?")
    page.execute_script("""
        let text = 'x'.repeat(1 << 20);
        for (let number = 0; text.length > 0; number++) {
          try { localStorage.setItem('fill' + number, text); } catch { text = text.slice(0, text.length >> 1); }
        }
    """)
    send(page, "Attack")
    assert "storage is full" in find(page, "#status").text
    assert [role for role, _ in shown(page)] == ["user", "assistant"] * 2


# Small and large, dark and light, two languages -----------------------------------


@contextmanager
def emulated(browser, width, height):
    """A phone of so many pixels."""
    size = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


WIDE = "\n\n".join(
    ["```\n" + "x = 1; " * 60 + "\n```", "|" + " column |" * 30 + "\n|" + "--|" * 30, "word" * 100,
     "`" + "code" * 90 + "`", "https://example.com/" + "path/" * 50, "# " + "Title" * 40, "- " * 9 + "deep " * 40]
)  # fmt: skip


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_down_alone(page, tmp_path, width):
    messages = [{"role": "user", "content": "word" * 100}, {"role": "assistant", "content": WIDE}]
    imported(page, tmp_path, {"messages": messages})
    with emulated(page, width, 700):
        page.refresh()
        wait_for(page, IDLE)
        too_wide = """
            return [...document.querySelectorAll('body *')].filter((each) =>
              each.checkVisibility({visibilityProperty: true})
              && each.getBoundingClientRect().right > innerWidth + 1 && !each.closest('.scroll, pre, .hidden'))
              .map((each) => each.outerHTML.slice(0, 80))"""
        assert page.execute_script(too_wide) == []
        assert page.execute_script("return document.documentElement.scrollWidth") == width
        beyond = "const box = document.getElementById('messages'); return box.scrollWidth - box.clientWidth"
        assert page.execute_script(beyond) == 0
        assert not find(page, "#sidebar").is_displayed()
        find(page, "#menu").click()
        assert find(page, "#menu").get_attribute("aria-expanded") == "true"
        assert page.execute_script(too_wide) == []
        find(page, "#new").click()
        assert not find(page, "#sidebar").is_displayed()
        find(page, "#input").send_keys("Who are you?")
        find(page, "#send").click()
        wait_for(page, IDLE)
        assert shown(page) == [["user", "Who are you?"], ["assistant", "I am a tiny model."]]
        find(page, "#open-settings").click()
        assert page.execute_script(too_wide) == []
        find(page, "#close-settings").click()


def test_dark_is_dark_and_is_remembered(page):
    from selenium.webdriver.support.ui import Select

    def brightness():
        color = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    for theme, right in (("dark", lambda value: value < 120), ("light", lambda value: value > 600)):
        find(page, "#open-settings").click()
        Select(find(page, "#theme")).select_by_value(theme)
        find(page, "#close-settings").click()
        assert right(brightness())
        page.refresh()
        wait_for(page, IDLE)
        assert right(brightness())


def test_russian_by_the_browsers_language(page, address):
    agent = page.execute_script("return navigator.userAgent")
    override = "Network.setUserAgentOverride"
    page.execute_cdp_cmd(override, {"userAgent": agent, "acceptLanguage": "de-DE,ru-RU,en-US"})
    try:
        fresh(page, address)
        assert page.execute_script("return document.documentElement.lang") == "ru"
        assert [find(page, f"#{name}").text for name in ("new", "send", "export")] == [
            "Новая беседа",
            "Отправить",
            "Экспорт",
        ]
        send(page, "Who are you?")
        assert find(page, "#info").text.startswith("токенов: ")
        buttons = [button.text for button in all_of(page, ".actions button")]
        assert buttons == ["Копировать", "Изменить", "Копировать", "Ответить заново"]
        find(page, "#open-settings").click()
        settings = find(page, "#settings").text
        assert "Температура" in settings
        untranslated = set(re.findall(r"[A-Za-z]{2,}", settings)) - {"Top", "Enter", "Shift", "Esc"}
        assert untranslated == set()
        find(page, "#close-settings").click()
    finally:
        page.execute_cdp_cmd(override, {"userAgent": agent, "acceptLanguage": "en-US"})


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page):
    from selenium.webdriver import ActionChains, Keys

    send(page, "Show code")
    press(page, 1, "Regenerate")
    wait_for(page, IDLE)
    controls = [each for each in all_of(page, "button, input, select, textarea, a") if each.is_displayed()]
    assert len(controls) > 15
    assert [each.get_attribute("outerHTML") for each in controls if not each.accessible_name] == []
    page.execute_script("document.body.tabIndex = -1; document.body.focus()")
    reached = set()
    for _ in range(40):
        ActionChains(page).send_keys(Keys.TAB).perform()
        reached.add(page.execute_script("const e = document.activeElement; return e.id || e.textContent || e.tagName"))
    assert {"new", "open-settings", "input", "send", "Copy", "Edit", "Regenerate", "export", "import"} <= reached


# What never ends, is full, wants a key, is gone -----------------------------------


def running(address):
    """How many answers the server is writing."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        return float(re.search(rb"^artel_answers (\S+)", answer.read(), re.MULTILINE)[1])


LENGTH = "[...document.querySelectorAll('.message .body')].at(-1)?.textContent.length"


def test_an_answer_comes_bit_by_bit_and_stops(browser, crowded):
    """The server goes on with nobody's answer: its one place is free again."""
    from selenium.webdriver import Keys

    page = fresh(browser, crowded, **{"artel.view": "chat"})
    send(page, "Go on", wait=False)
    before = wait_for(page, LENGTH, lambda length: length and length > 10)
    question = all_of(page, ".message")[0]
    wait_for(page, LENGTH, lambda length: length > before)
    assert running(crowded) == 1
    assert not find(page, "#send").is_displayed()
    find(page, "#stop").click()
    wait_for(page, IDLE)
    wait_until(lambda: running(crowded) == 0)
    assert find(page, ".note").text == "Stopped: the answer is not whole."
    assert question == all_of(page, ".message")[0]  # not drawn anew: a screen reader would read it again
    text = shown(page)[-1]
    page.refresh()
    wait_for(page, IDLE)
    assert shown(page)[-1] == text
    press(page, 1, "Regenerate")
    wait_for(page, LENGTH, lambda length: length and length > 10)
    find(page, "#input").send_keys(Keys.ESCAPE)
    wait_for(page, IDLE)
    wait_until(lambda: running(crowded) == 0)
    assert "2 / 2" in all_of(page, ".message")[1].text
    assert errors(page) == []


def test_a_busy_server_is_told_in_words(browser, crowded):
    page = fresh(browser, crowded, **{"artel.view": "chat"})
    send(page, "First", wait=False)
    wait_for(page, LENGTH, lambda length: length and length > 10)
    find(page, "#new").click()
    send(page, "Second", wait=False)
    wait_for(page, "document.querySelector('#messages .notice')")
    assert find(page, "#messages .notice").text.startswith("The server is busy. Try again in 1 s.")
    assert shown(page) == [["user", "Second"]]
    assert [error for error in errors(page) if " 429 " not in error] == []
    open_titled(page, "First")  # which was answered all the while
    assert shown(page)[0] == ["user", "First"]
    find(page, "#stop").click()
    wait_until(lambda: running(crowded) == 0)
    answer = shown(page)[-1]
    open_titled(page, "Second")
    find(page, "#messages .notice button").click()
    wait_for(page, LENGTH, lambda length: length and length > 10)
    open_titled(page, "First")
    press(page, 1, "Regenerate")
    wait_for(page, "document.querySelector('#messages .notice')")
    assert shown(page)[-1] == answer  # the one there was, as there is no other
    errors(page)  # 429
    open_titled(page, "Second")
    find(page, "#conversations li.current button[aria-label^='Delete']").click()
    find(page, "#ask-yes").click()
    wait_until(lambda: running(crowded) == 0)
    assert titles(page) == ["First"]


def test_a_text_is_continued_stopped_and_taken_back(browser, crowded):
    from selenium.webdriver import Keys

    page = fresh(browser, crowded, view="text")
    value = "document.getElementById('text').value"
    field = find(page, "#text")
    field.send_keys("Who", Keys.CONTROL + Keys.ENTER + Keys.NULL)
    wait_for(page, f"{value}.length > 20")
    find(page, "#text-stop").click()
    wait_for(page, "document.getElementById('text-stop').hidden")
    wait_until(lambda: running(crowded) == 0)
    text = page.execute_script(f"return {value}")
    assert text.startswith("Who")
    page.refresh()
    wait_for(page, "document.body.dataset.view === 'text'")
    assert page.execute_script(f"return {value}") == text
    find(page, "#open-settings").click()
    find(page, "#max_tokens").send_keys("5")
    find(page, "#close-settings").click()
    find(page, "#text-go").click()
    wait_for(page, "document.getElementById('text-info').textContent.startsWith('tokens: 5')")
    assert len(page.execute_script(f"return {value}")) > len(text)
    find(page, "#text-undo").click()
    assert page.execute_script(f"return {value}") == text
    assert not find(page, "#text-again").is_enabled()
    assert errors(page) == []


def posted(address, path, **body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer open sesame"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_masks_are_filled_once_the_key_is_given(browser, tmp_path):
    from selenium.webdriver import Keys

    run = objective_run(tmp_path / "masked.yaml", "masked")
    assert artel("train", run).returncode == 0
    with server_of(tmp_path / "masked", "--api-key", "open sesame") as server:
        browser.get(server.url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get(server.url)
        for key, about in (("wrong", "started with a key"), ("open sesame", "did not accept that key")):
            wait_for(
                browser, "document.getElementById('ask-about').textContent", lambda text, about=about: about in text
            )
            wait_for(browser, "document.getElementById('ask').open")
            find(browser, "#ask-value").send_keys(key, Keys.ENTER)
        wait_for(browser, "document.body.dataset.view === 'mask'")
        assert browser.execute_script("return Object.values(sessionStorage)").count("open sesame") == 1
        assert "sesame" not in browser.execute_script("return JSON.stringify(localStorage)")
        errors(browser)  # the refusals
        find(browser, "#mask-text").send_keys("the ", Keys.ENTER)
        assert "Write <mask> where a word is to be found" in find(browser, "#mask-problem").text
        find(browser, "#mask-insert").click()
        find(browser, "#mask-text").send_keys(" of <mask>.", Keys.ENTER)
        wait_for(browser, "document.querySelectorAll('.candidates').length === 2")
        (expected,) = posted(server.url, "/v1/fill-mask", input="the <mask> of <mask>.", top_k=5)["data"]
        assert find(browser, ".filled").text == expected["text"].strip()
        rows = [[cell.text for cell in all_of(row, "td")[:2]] for row in all_of(browser, ".candidates tr")]
        assert rows == [
            [each["token"].strip() or "␣", f"{each['score'] * 100:.1f} %"]
            for mask in expected["masks"]
            for each in mask
        ]
        all_of(browser, ".candidates button")[5].click()
        filled = f"the <mask> of {expected['masks'][1][0]['token'].strip()}."
        assert find(browser, "#mask-text").get_attribute("value") == filled
        assert errors(browser) == []


def test_questions_are_answered_until_the_server_is_gone(browser, tmp_path):
    from selenium.webdriver import Keys

    run = objective_run(tmp_path / "asked.yaml", "span_qa")
    assert artel("train", run).returncode == 0
    with server_of(tmp_path / "asked") as server:
        page = fresh(browser, server.url, view="question")
        context, question = "😀 the baker is in the forest . the miller is in the garden .", "where is the miller ?"
        page.execute_script("document.getElementById('context').value = arguments[0]", context)
        find(page, "#question").send_keys(question, Keys.ENTER)
        wait_for(page, "document.querySelector('.answer')")
        expected = posted(server.url, "/v1/answers", question=question, context=context)
        marked = page.execute_script("return document.querySelector('mark')?.textContent")
        assert marked == (context[expected["start"] : expected["end"]] if expected["start"] is not None else None)
        words = {"yes": "Yes", "no": "No"}
        assert find(page, ".answer strong").text == words.get(
            expected["kind"], expected["answer"] or "The text does not answer that."
        )
        assert errors(page) == []
        server.end()
        find(page, "#question").send_keys(Keys.ENTER)
        wait_for(page, "!document.getElementById('question-problem').hidden")
        assert (
            "The server does not answer. Look whether `artel serve` still runs" in find(page, "#question-problem").text
        )
        assert find(page, "#question-problem button").text == "Try again"
