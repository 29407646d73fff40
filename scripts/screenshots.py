"""Pictures of the report in Chromium, for docs/pictures: desktop, phone, dark, Russian, two runs side by side.

    python scripts/screenshots.py RUN [RUN]

The first run is shown alone, both together where there are two. Needs chromium, chromedriver and selenium
(apt-get install chromium chromium-driver; the extra `dev`), and pillow, which makes the pictures small.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

from artel.reports.page import Page
from artel.reports.run_data import read_runs

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars"
).split()
DESKTOP, PHONE = (1180, 1500, 1.0, False), (390, 844, 2.0, True)
COLORS = 200  # of the palette of a picture
_DRAWN = "return [...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('.main-svg'))"


def main(folders: list[str]) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    runs = read_runs(folders)
    with tempfile.TemporaryDirectory() as folder:
        browser = open_browser(Path(folder))
        try:
            english, russian = _written(folder, "en", runs[:1]), _written(folder, "ru", runs[:1])
            _take(browser, english, "report.png", DESKTOP)
            _take(browser, english, "report-dark.png", DESKTOP, theme="dark")
            _take(browser, english, "report-phone.png", PHONE)
            _take(browser, russian, "report-ru.png", DESKTOP)
            if len(runs) > 1:
                _take(browser, _written(folder, "en", runs), "report-runs.png", DESKTOP)
        finally:
            browser.quit()


def open_browser(profile: Path) -> Any:
    """Chromium without a screen, by selenium."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={profile / 'chromium'}"):
        options.add_argument(flag)
    options.binary_location = _program("chromium")
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(_program("chromedriver")))


def _program(name: str) -> str:
    """Its path. selenium would look for one in the network itself."""
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"{name} is not installed: apt-get install chromium chromium-driver")
    return path


def _written(folder: str, language: str, runs: list[Any]) -> str:
    file = Path(folder) / f"{language}-{len(runs)}.html"
    file.write_text(Page(language).html(runs), encoding="utf-8")
    return file.as_uri()


def _take(browser: Any, address: str, name: str, size: tuple[int, int, float, bool], theme: str = "light") -> None:
    set_size(browser, size)
    browser.get(address)
    browser.execute_script(f"document.querySelector('input[name=theme][value={theme}]').click()")
    while not browser.execute_script(_DRAWN):
        time.sleep(0.1)
    save_picture(browser, name)


def set_size(browser: Any, size: tuple[int, int, float, bool]) -> None:
    width, height, scale, mobile = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def save_picture(browser: Any, name: str) -> None:
    """What the browser shows, in docs/pictures, with few colors."""
    picture = Image.open(BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(PICTURES / name, optimize=True)
    print(f"{PICTURES / name}: {picture.width} × {picture.height}, {(PICTURES / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
