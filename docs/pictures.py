"""Makes the pictures of the console in `docs/pictures` from the demo, in a real Chromium.

Run it with `python -m docs.pictures`. It takes about two minutes.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.chromium import chromium, tab

FOLDER: Final = Path(__file__).with_name("pictures")
PAGES: Final = {
    "overview": ("/", "Needs a person now"),
    "consumer": ("/consumer?name=long-delays", "Partitions"),
    "topic": ("/topic?name=flights.long_delays", "every partition is replicated"),
}
"""Name of the picture: the page, and a text that it has once it is complete."""
_PLOT_MS: Final = 15_000
"""How long a page is open before its picture, so that its plots have points."""


def main() -> None:
    """Run the demo, and make a picture of each page."""
    demo = [sys.executable, "-m", "headrace.cli.main", "demo", "--keep"]
    with subprocess.Popen(demo, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = next(found[1] for line in process.stdout if (found := re.search(r"console (http://\S+)", line)))
        FOLDER.mkdir(exist_ok=True)
        with chromium() as browser, tab(browser, viewport={"width": 1280, "height": 760}) as page:
            for name, (path, text) in PAGES.items():
                page.goto(url + path)
                page.get_by_text(text, exact=True).first.wait_for()
                page.wait_for_timeout(_PLOT_MS)
                page.screenshot(path=FOLDER / f"{name}.png")
        process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
