"""The chat page in Chromium, by the real server: tiny models that artel trained, their answers on the screen."""

import re

import pytest

from support.browser import errors, wait_for
from support.chat_page import ATTACK, CODE, IDLE, all_of, find, imported, press, send, shown, titles

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

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
    messages = [{"role": role, "content": ATTACK} for role in ("user", "assistant")]
    imported(page, tmp_path, {"messages": messages})
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
