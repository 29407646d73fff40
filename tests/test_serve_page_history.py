"""Conversations that the chat page keeps in the browser: reloaded, renamed, exported, imported, in two tabs."""

import json

import pytest

from support.browser import wait_for
from support.chat_page import IDLE, all_of, find, send, shown, titles
from support.reading import items
from support.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]


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


def test_what_is_exported_is_what_format_chat_reads_and_comes_back(page, tmp_path):
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    find(page, "#open-settings").click()
    find(page, "#system").send_keys("Speak Russian.")
    find(page, "#close-settings").click()
    send(page, "Who are you?")
    find(page, "#export").click()
    file = tmp_path / "conversations.jsonl"
    wait_until(file.exists, lambda: list(tmp_path.iterdir()))
    said = [("system", "Speak Russian."), ("user", "Who are you?"), ("assistant", "Я маленькая модель.")]
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
    named = [line for line in (1, 2, 3, 4) if f"talks.jsonl: Line {line} is not a conversation" in text]
    assert named == [2, 3, 4]


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
