"""The chat page of models that never end, fill masks or answer questions, and of servers that are busy or gone."""

import json
import re
import urllib.request

import pytest

from support.browser import errors, wait_for
from support.chat_page import IDLE, all_of, find, fresh, open_titled, press, send, shown, titles
from support.objectives import objective_run
from support.runs import succeed
from support.serving import server_of
from support.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def crowded(endless):
    """The server of a model that never ends a text, with one place and no queue."""
    with server_of(endless, "--requests", "1", "--queue", "0") as server:
        yield server.url


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
    assert find(page, ".note").text == "Stopped: the answer is incomplete."
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
    succeed("train", run)
    with server_of(tmp_path / "masked", "--api-key", "open sesame") as server:
        browser.get(server.url)
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get(server.url)
        for key, about in (("wrong", "started with a key"), ("open sesame", "did not accept this key")):
            told = "document.getElementById('ask-about').textContent"
            wait_for(browser, told, lambda text, about=about: about in text)
            wait_for(browser, "document.getElementById('ask').open")
            find(browser, "#ask-value").send_keys(key, Keys.ENTER)
        wait_for(browser, "document.body.dataset.view === 'mask'")
        assert browser.execute_script("return Object.values(sessionStorage)").count("open sesame") == 1
        assert "sesame" not in browser.execute_script("return JSON.stringify(localStorage)")
        errors(browser)  # the refusals
        find(browser, "#mask-text").send_keys("the ", Keys.ENTER)
        assert "Write <mask> where a word is missing" in find(browser, "#mask-problem").text
        find(browser, "#mask-insert").click()
        find(browser, "#mask-text").send_keys(" of <mask>.", Keys.ENTER)
        wait_for(browser, "document.querySelectorAll('.candidates').length === 2")
        (expected,) = posted(server.url, "/v1/fill-mask", input="the <mask> of <mask>.", top_k=5)["data"]
        assert find(browser, ".filled").text == expected["text"].strip()
        rows = [[cell.text for cell in all_of(row, "td")[:2]] for row in all_of(browser, ".candidates tr")]
        found = [each for mask in expected["masks"] for each in mask]
        assert rows == [[each["token"].strip() or "␣", f"{each['score'] * 100:.1f} %"] for each in found]
        all_of(browser, ".candidates button")[5].click()
        filled = f"the <mask> of {expected['masks'][1][0]['token'].strip()}."
        assert find(browser, "#mask-text").get_attribute("value") == filled
        assert errors(browser) == []


def test_questions_are_answered_until_the_server_is_gone(browser, tmp_path):
    from selenium.webdriver import Keys

    run = objective_run(tmp_path / "asked.yaml", "span_qa")
    succeed("train", run)
    with server_of(tmp_path / "asked") as server:
        page = fresh(browser, server.url, view="question")
        context, question = "😀 the baker is in the forest . the miller is in the garden .", "where is the miller ?"
        page.execute_script("document.getElementById('context').value = arguments[0]", context)
        find(page, "#question").send_keys(question, Keys.ENTER)
        wait_for(page, "document.querySelector('.answer')")
        expected = posted(server.url, "/v1/answers", question=question, context=context)
        marked = page.execute_script("return document.querySelector('mark')?.textContent")
        assert marked == (context[expected["start"] : expected["end"]] if expected["start"] is not None else None)
        words = {"yes": "Yes", "no": "No"}.get(expected["kind"], expected["answer"] or "The text does not answer that.")
        assert find(page, ".answer strong").text == words
        assert errors(page) == []
        server.end()
        find(page, "#question").send_keys(Keys.ENTER)
        wait_for(page, "!document.getElementById('question-problem').hidden")
        assert "Check that `artel serve` is still running" in find(page, "#question-problem").text
        assert find(page, "#question-problem button").text == "Try again"
