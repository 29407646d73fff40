"""The report in Chromium: values in the page, hover, zoom, switches, a phone; --live while a run trains and dies."""

import base64
import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from support.browser import chromium, errors, wait_for
from support.runs import artel, start, wait_for_step, write_run
from support.waiting import LIMIT, Screen

pytestmark = pytest.mark.processes

PLOT = "document.getElementById('plot-loss')"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that was trained and resumed, with samples, a profile and a ledger."""
    folder = tmp_path_factory.mktemp("trained")
    file = write_run(
        folder / "run.yaml",
        train={"steps": 40, "schedule": "constant"},  # whose length may change
        validate={"every": 10, "prompts": ["the", "<b>once</b>"], "new_tokens": 8},
        checkpoint={"every": 10},
        profile=True,
    )
    for more in ([], ["train.steps=60"]):
        done = artel("train", file, *more)
        assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def page(run, tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("page") / "report.html"
    done = artel("report", run, "--html", file)
    assert done.returncode == 0, done.stderr
    return file.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def opened(browser, page):
    browser.set_window_size(1280, 900)
    browser.get(page)
    browser.execute_script("localStorage.clear()")
    browser.get(page)
    wait_for(browser, f"{PLOT}.querySelectorAll('.scatterlayer .trace').length", lambda count: count >= 3)
    assert errors(browser) == []
    return browser


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_values_are_those_of_the_run(opened, run):
    lines = lines_of(run)
    loss = [line["loss"] for line in lines if "loss" in line]
    held_out = [line["validation"]["loss"] for line in lines if "validation" in line]
    assert opened.find_element("css selector", ".state").text == "complete"
    tiles = {
        tile.find_element("css selector", ".label").text: tile.find_element("css selector", ".figure").text
        for tile in opened.find_elements("css selector", ".tile")
    }
    assert tiles["validation loss"] == f"{held_out[-1]:.3f}"
    assert tiles["training loss"] == f"{loss[-1]:.3f}"
    drawn = wait_for(opened, f"{PLOT}.data.map((trace) => [trace.name, trace.x.length, trace.y.at(-1)])")
    by_name = {name: (count, last) for name, count, last in drawn}
    assert by_name["training"] == (60, pytest.approx(loss[-1], rel=1e-5))
    assert by_name["validation"] == (len(held_out), pytest.approx(held_out[-1], rel=1e-5))
    assert by_name["restart"][0] == 1


def test_hovering_a_curve_tells_its_value(opened, run):
    from selenium.webdriver import ActionChains

    plot = opened.find_element("css selector", "#plot-loss .nsewdrag")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(opened).move_to_element(plot).perform()
    text = wait_for(opened, f"{PLOT}.querySelector('.hoverlayer')?.textContent")
    step = int(re.match(r"\d+", text)[0])
    loss = {line["step"]: line["loss"] for line in lines_of(run) if "loss" in line}[step]
    assert f"training : {loss:.5g}"[:14] in text


def test_the_switches(opened):
    def click(selector):
        opened.execute_script("arguments[0].click()", opened.find_element("css selector", selector))

    click("input[name=axis][value=tokens]")
    assert wait_for(opened, f"{PLOT}.data[0].x.at(-1)") == 60 * 2048
    click("input[name=axis][value=seconds]")
    assert wait_for(opened, f"{PLOT}.layout.xaxis.title.text") in ("seconds", "minutes")
    click("#log-y")
    assert wait_for(opened, f"{PLOT}.layout.yaxis.type") == "log"
    click("#log-y")
    click("input[name=axis][value=step]")
    click("#log-x")
    assert wait_for(opened, f"{PLOT}.layout.xaxis.type") == "log"
    click("#log-x")
    count = wait_for(opened, f"{PLOT}.data.length")
    opened.execute_script(
        "const s = document.getElementById('smoothing'); s.value = 0.9; s.dispatchEvent(new Event('input'))"
    )
    assert wait_for(opened, f"{PLOT}.data.length") == count + 1
    raw, smooth = opened.execute_script(f"return {PLOT}.data.slice(0, 2).map((trace) => trace.y)")
    mean, weight = 0.0, 0.0
    for value in raw:
        mean, weight = mean * 0.9 + value, weight * 0.9 + 1
    assert smooth[-1] == pytest.approx(mean / weight)
    click("#marks")
    assert "restart" not in wait_for(opened, f"{PLOT}.data.map((trace) => trace.name)")
    assert errors(opened) == []


def test_a_zoom_is_that_of_all_plots_and_keys_zoom_too(opened):
    from selenium.webdriver import ActionChains, Keys

    other = "[...document.querySelectorAll('.plot')].find((plot) => plot.id.startsWith('plot-learning'))"
    opened.execute_script(f"Plotly.relayout({PLOT}, {{'xaxis.range': [10, 30]}})")
    assert wait_for(opened, f"{other}.layout.xaxis.range", lambda range: range == [10, 30])
    opened.execute_script(f"{PLOT}.focus()")
    ActionChains(opened).send_keys("+").perform()
    assert wait_for(opened, f"{PLOT}.layout.xaxis.range", lambda range: range != [10, 30]) == [14, 26]
    ActionChains(opened).send_keys(Keys.ARROW_RIGHT).perform()
    wait_for(opened, f"{PLOT}.layout.xaxis.range[0]", lambda low: low > 14)
    ActionChains(opened).send_keys("0").perform()
    wait_for(opened, f"{other}.layout.xaxis.autorange")


def test_all_controls_are_reached_by_the_keyboard(opened):
    from selenium.webdriver import ActionChains, Keys

    opened.execute_script("document.body.tabIndex = -1; document.body.focus()")
    reached = []
    for _ in range(14):
        ActionChains(opened).send_keys(Keys.TAB).perform()
        reached.append(opened.execute_script("const e = document.activeElement; return e.id || e.name || e.className"))
    assert reached[0] == "skip"
    assert {"theme", "axis", "smoothing", "log-x", "log-y", "marks", "reset"} <= set(reached)


def test_dark_is_dark_and_is_remembered(opened, page):
    def background():
        return opened.execute_script("return getComputedStyle(document.body).backgroundColor")

    light = background()
    opened.execute_script("document.querySelector('input[name=theme][value=dark]').click()")
    dark = background()
    assert sum(map(int, re.findall(r"\d+", dark)[:3])) < 120 < 600 < sum(map(int, re.findall(r"\d+", light)[:3]))
    opened.get(page)
    assert background() == dark


def test_nothing_is_wider_than_a_phone(opened, page):
    opened.set_window_size(390, 844)
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        opened.get(page)
        wait_for(opened, f"{PLOT}.querySelector('.main-svg')?.clientWidth", lambda width: 200 < width <= 390)
        assert opened.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_in_print_it_is_light_and_without_switches(opened):
    opened.execute_script("document.querySelector('input[name=theme][value=dark]').click()")
    try:
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        opened.execute_script("window.dispatchEvent(new Event('beforeprint'))")
        colors = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, re.findall(r"\d+", colors)[:3])) > 600
        assert opened.execute_script("return getComputedStyle(document.querySelector('.controls')).display") == "none"
        pdf = opened.execute_cdp_cmd("Page.printToPDF", {})["data"]
        assert base64.b64decode(pdf).startswith(b"%PDF")
    finally:
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_russian_page_draws_in_russian(browser, run, tmp_path):
    file = tmp_path / "ru.html"
    assert artel("report", run, "--html", file, "--language", "ru").returncode == 0
    browser.get(file.as_uri())
    names = wait_for(browser, f"{PLOT}.data.map((trace) => trace.name)")
    assert {"обучение", "валидация", "перезапуск"} <= set(names)
    assert re.fullmatch("[а-я ]+", wait_for(browser, f"{PLOT}.layout.xaxis.title.text"))
    assert errors(browser) == []


def test_texts_of_the_run_are_texts(opened):
    assert opened.find_elements("css selector", ".samples b") == []
    assert "<b>once</b>" in opened.find_element("css selector", "#samples").text


# Live -------------------------------------------------------------------------------------


@pytest.fixture
def serve():
    """Starts `artel report --live`; gives the process and its address. All are ended after the test."""
    started: list[subprocess.Popen] = []

    def begin(*arguments) -> tuple[subprocess.Popen, str]:
        process = start("report", *arguments, "--live", "--port", "0")
        started.append(process)
        screen = Screen(process.stderr.fileno())
        screen.read_until(lambda text: re.search(r"http://127\.0\.0\.1:\d+/ and", text) or "artel: " in text)
        return process, re.search(r"http://127\.0\.0\.1:\d+/", screen.text)[0]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_live_follows_a_run_that_trains_and_is_killed(browser, serve, tmp_path):
    file = write_run(tmp_path / "run.yaml", train={"steps": 100_000}, validate={"every": 20, "blocks": 2})
    training = start("train", str(file))
    try:
        wait_for_step(training, tmp_path / "run", 3)
        server, address = serve("run")
        browser.get(address)
        state = "document.querySelector('.state').textContent"
        newest = f"{PLOT}?.data?.[0].x.at(-1)"
        assert wait_for(browser, state) == "running"
        first = wait_for(browser, newest)
        browser.execute_script(f"Plotly.relayout({PLOT}, {{'xaxis.range': [1, 3]}})")
        wait_for(browser, newest, lambda step: step > first)
        assert browser.execute_script(f"return {PLOT}.layout.xaxis.range") == [1, 3]  # a zoom is kept
        assert "of 100,000" in browser.find_element("css selector", ".verdict").text
    finally:
        training.kill()
        training.communicate(timeout=LIMIT)
    assert wait_for(browser, state, lambda text: text == "dead")
    assert "No sign of life for" in browser.find_element("css selector", ".verdict").text
    last = [line["step"] for line in lines_of(tmp_path / "run") if "loss" in line][-1]
    assert wait_for(browser, newest, lambda step: step >= last) == last
    assert errors(browser) == []
    server.terminate()
    server.communicate(timeout=LIMIT)
    assert "no answer" in wait_for(browser, "document.getElementById('connection').textContent")


def test_live_shows_a_damaged_line_and_goes_on(browser, serve, run):
    _, address = serve(run)
    browser.get(address)
    wait_for(browser, f"{PLOT}?.data?.length")
    content = (run / "samples.jsonl").read_text()
    try:
        (run / "samples.jsonl").write_text(content + "x\n")
        message = wait_for(browser, "document.getElementById('connection').textContent")
        assert "samples.jsonl" in message
        assert "is not a line of a run" in message
    finally:
        (run / "samples.jsonl").write_text(content)
    wait_for(browser, "document.getElementById('connection').hidden")
    assert browser.execute_script("return document.querySelector('.state').textContent") == "complete"


def test_live_ends_by_ctrl_c_and_says_that_a_port_is_taken(run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = artel("report", run, "--live", "--port", port)
        assert refused.returncode == 2
        assert f"--port: {port} is in use by another program" in refused.stderr
    server = start("report", str(run), "--live", "--port", "0")
    screen = Screen(server.stderr.fileno())
    screen.read_until(lambda text: "Ctrl-C ends it" in text)
    server.send_signal(signal.SIGINT)
    assert server.wait(LIMIT) == 0
    server.communicate()


def test_live_answers_by_this_machines_own_name_alone(serve, run):
    _, address = serve(run)
    with urllib.request.urlopen(address, timeout=LIMIT) as answer:
        assert answer.status == 200
        assert b"connect-src &#39;self&#39;" in answer.read(100_000)
    for path, host, status in (("", "evil.example", 403), ("../../etc/passwd", "127.0.0.1", 404)):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(address + path, headers={"Host": host}), timeout=LIMIT)
        assert error.value.code == status
