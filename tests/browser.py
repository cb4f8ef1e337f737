"""What a browser makes of the site: no page scrolls sideways, on a telephone or a desk, light or dark.

    uv run --group docs mkdocs build -f docs/site/mkdocs.yml
    python -m tests.browser build/site --shots /tmp/shots

Needs Chromium (`apt-get install chromium`), so it is no test. Each page is laid out in frames of 400 and 1400 pixels;
pages that are wider than their frame are printed, and make the exit code 1. With `--shots FOLDER`, those of `--pages`
are drawn in both widths and both colour schemes, to be looked at.
"""

import argparse
import json
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WIDTHS, SCHEMES = (400, 1400), {"light": 1, "dark": 0}
FRAMES = """<!doctype html><body style="margin:0"><pre id="found"></pre><script>
const found = {}
const load = (page, width) => new Promise(done => {
  const frame = document.createElement("iframe")
  frame.style = `width:${width}px;height:900px;border:0`
  frame.onload = () => setTimeout(() => {
    const inside = frame.contentDocument.documentElement
    found[`${page} at ${width}`] = [inside.scrollWidth, frame.contentWindow.innerWidth]
    frame.remove()
    done()
  }, 300)
  frame.src = page
  document.body.append(frame)
})
const all = async () => {
  for (const page of PAGES) for (const width of WIDTHS) await load(page, width)
  document.getElementById("found").textContent = JSON.stringify(found)
}
all()
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path not in self.server.made:  # pyright: ignore
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.server.made[self.path].encode())  # pyright: ignore


def chromium(*options: str) -> str:
    run = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
    return subprocess.run(run, capture_output=True, text=True, check=True, timeout=600).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--shots", type=Path, help="a folder")
    parser.add_argument("--height", type=int, default=2000)
    parser.add_argument("--pages", nargs="*", default=["", "layouts/", "benchmarks/"])
    args = parser.parse_args()
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(args.site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    pages = [f"/{path.relative_to(args.site).parent}/" for path in sorted(args.site.rglob("index.html"))]
    script = FRAMES.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    server.made = {"/frames": script}
    shown = re.search(
        r'<pre id="found">(.+?)</pre>', chromium("--virtual-time-budget=600000", "--dump-dom", f"{url}/frames")
    )
    assert shown, "the browser measured nothing"
    found = json.loads(shown[1])
    wide = {page: sizes for page, sizes in found.items() if sizes[0] > sizes[1]}
    print(f"{len(found)} pages and widths, {len(wide)} too wide", *wide.items(), sep="\n")
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)  # Chromium says nothing where there is no folder
    for page in args.pages if args.shots else []:
        for width in WIDTHS:
            frame = (
                f'<body style="margin:0"><iframe src="/{page}" style="border:0;width:{width}px;height:{args.height}px">'
            )
            server.made["/shot"] = frame
            for scheme, number in SCHEMES.items():
                name = f"{page.strip('/').replace('/', '-') or 'index'}-{width}-{scheme}.png"
                size, colors = (
                    f"--window-size={max(width, 500)},{args.height}",
                    f"--blink-settings=preferredColorScheme={number}",
                )
                chromium(colors, size, "--virtual-time-budget=5000", f"--screenshot={args.shots / name}", f"{url}/shot")
    sys.exit(bool(wide))


if __name__ == "__main__":
    main()
