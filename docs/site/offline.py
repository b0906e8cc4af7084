"""Says what pages of a folder load from elsewhere: `python docs/site/offline.py FOLDER`; exit status 1 if any does.

Links that a reader follows may lead anywhere; scripts, styles, fonts, pictures and frames may not, nor may a script
name an address that it could fetch. Names of XML namespaces are no addresses.
"""

import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

LOADING = ("src", "srcdoc", "srcset", "poster", "data", "xlink:href")
"""Attributes whose address a browser loads by itself, of any tag."""

LOADING_BY_HREF = ("image", "link", "use")
"""Tags of which it loads `href`, too."""

NAMED_ONLY = {"alternate", "author", "canonical", "help", "license", "next", "prev", "search", "bookmark"}
"""Relations of a `link` that load nothing."""

_ADDRESS = re.compile(r"(?:^|,)\s*((?:https?:|wss?:|ftp:)?//[^\s,]+)", re.IGNORECASE)
_IN_STYLE = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\"')\s;]+)", re.IGNORECASE)
_IN_SCRIPT = re.compile(r"[\"'`]((?:https?:|wss?:)//(?!www\.w3\.org/)[^\"'`]+|//[\w-]+(?:\.[\w-]+)+[/\w.-]*)[\"'`]")


class _Page(HTMLParser):
    """Collects what a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._inside = tag if tag in {"script", "style"} else ""
        self.found += in_style(given.get("style", ""))
        if tag == "link" and given.get("rel", "") in NAMED_ONLY:
            return
        for name in (*LOADING, *(("href",) if tag in LOADING_BY_HREF else ())):
            self.found += _ADDRESS.findall(given.get(name, ""))
        if tag == "meta" and given.get("http-equiv", "").lower() == "refresh":
            self.found += re.findall(r"url=\s*(https?://.*)", given.get("content", ""), re.IGNORECASE)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found += (in_script if self._inside == "script" else in_style)(data)


def in_page(text: str) -> list[str]:
    """Addresses elsewhere that a page loads."""
    page = _Page()
    page.feed(text)
    page.close()
    return page.found


def in_style(text: str) -> list[str]:
    """Addresses elsewhere that a style sheet loads."""
    return _IN_STYLE.findall(text)


def in_script(text: str) -> list[str]:
    """Addresses elsewhere that a script has among its texts."""
    return _IN_SCRIPT.findall(text)


READERS: dict[str, Callable[[str], list[str]]] = {".html": in_page, ".svg": in_page, ".css": in_style, ".js": in_script}


def loaded_from_elsewhere(folder: Path) -> Iterator[tuple[Path, str]]:
    """(file, address) of everything that the files of a folder load from elsewhere."""
    for path in sorted(folder.rglob("*")):
        reader = READERS.get(path.suffix)
        if reader is not None:
            yield from ((path.relative_to(folder), address) for address in reader(path.read_text(encoding="utf-8")))


def main() -> int:
    """List what is found."""
    folder = Path(sys.argv[1])
    if not (folder / "index.html").is_file():
        print(f"{folder} has no index.html: it is no site", file=sys.stderr)
        return 1
    found = list(loaded_from_elsewhere(folder))
    for path, address in found:
        print(f"{path} loads {address}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
