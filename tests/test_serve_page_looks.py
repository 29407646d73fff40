"""The chat page small and large, dark and light, in two languages, by keyboard."""

import re
from contextlib import contextmanager

import pytest

from support.browser import wait_for
from support.chat_page import IDLE, all_of, find, fresh, imported, press, send, shown

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]


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
        named = [find(page, f"#{name}").text for name in ("new", "send", "export")]
        assert named == ["Новая беседа", "Отправить", "Экспорт"]
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
