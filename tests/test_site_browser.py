"""The site in Chromium, without a network: search finds pages in both languages, and a phone can read them."""

import functools
from http.server import SimpleHTTPRequestHandler

import pytest

from support.browser import chromium
from support.servers import QuietHandler, http_server

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]
PATIENCE = 300  # seconds that a busy machine may take to show a page
# The search box lies in a shadow root.
BOX = """
const boxes = [...document.querySelectorAll("div")].filter(each => each.shadowRoot);
const box = boxes.find(each => each.shadowRoot.querySelector("input"));
const links = box ? [...box.shadowRoot.querySelectorAll("a")] : [];
"""
HAS_BOX = f"{BOX} return box != null;"
RESULTS = f"{BOX} return links.map(each => each.href);"
RESULT = f"{BOX} return links.find(each => each.href.includes(arguments[0]));"
SEARCHED = [
    ("index.html", "mean average precision", "metrics.html"),
    ("ru/index.html", "токенизатор", "ru/tutorials/novel.html"),
]


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served, on loopback."""

    class Quiet(QuietHandler, SimpleHTTPRequestHandler):
        pass

    with http_server(functools.partial(Quiet, directory=site)) as address:
        yield address


@pytest.fixture
def browser(tmp_path):
    with chromium(tmp_path / "chromium") as opened:
        yield opened


def be_a_phone(browser):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)


def finds(browser, words, page, opener="button.md-search__button"):
    """True once the search box lists a page for some words; the list changes with each letter."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.wait import WebDriverWait

    wait = WebDriverWait(browser, PATIENCE)
    button = wait.until(lambda shown: shown.find_element(By.CSS_SELECTOR, opener))
    wait.until(lambda _: button.is_displayed())
    wait.until(lambda shown: shown.execute_script(HAS_BOX))
    asked = "return document.getElementById('__search').checked"  # a second click would take it back
    opened = "return document.activeElement.shadowRoot?.activeElement != null"

    def open_box(shown):
        if not shown.execute_script(asked):
            button.click()
        return shown.execute_script(opened)

    wait.until(open_box)
    ActionChains(browser).send_keys(words).perform()
    return wait.until(lambda shown: any(page in link for link in shown.execute_script(RESULTS)))


def opens(browser, page):
    """Click a page that the search box lists; true once the browser is there."""
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.wait import WebDriverWait

    wait = WebDriverWait(browser, PATIENCE, ignored_exceptions=[StaleElementReferenceException])

    def click(shown):
        link = shown.execute_script(RESULT, page)
        if link is not None:
            link.click()
        return link

    wait.until(click)
    return wait.until(lambda shown: page in shown.current_url)


@pytest.mark.parametrize(("page", "words", "found"), SEARCHED)
def test_search_finds_pages(browser, address, page, words, found):
    browser.get(f"{address}/{page}")
    assert finds(browser, words, found)


@pytest.mark.parametrize(("page", "words", "found"), SEARCHED)
def test_a_phone_finds_pages_and_opens_them(browser, address, page, words, found):
    be_a_phone(browser)
    browser.get(f"{address}/{page}")
    assert finds(browser, words, found, "label[for=__search]")
    assert opens(browser, found)


def test_search_works_where_the_site_is_opened_as_a_file(browser, site):
    browser.get((site / "index.html").as_uri())
    assert finds(browser, "Slurm partition", "clusters.html")


PAGES = ["index.html", "ru/index.html", "plan.html", "run-file.html", "reference/commands.html"]


@pytest.mark.parametrize("page", PAGES)
def test_a_phone_reads_a_page_without_scrolling_sideways(browser, address, page):
    be_a_phone(browser)
    browser.get(f"{address}/{page}")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
