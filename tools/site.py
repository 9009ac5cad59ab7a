"""Make a site of docs/: a hook of mkdocs, which `make site` runs.

The pages stay as they are read in a checkout. The hook takes the navigation from the index,
docs/README.md, and adds a page for each file outside docs/ that a page links to: Markdown as it is,
other text as a code block.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
MERMAID = ROOT / "build/site-tools/mermaid/mermaid.min.js"
STYLE = ROOT / "tools/site.css"
OUTSIDE = "repository"  # the folder of the site for files outside docs/
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".jinja": "jinja"}
LINK = re.compile(r"(?<=\]\()([^)\s#]+)((?:#[^)\s]*)?(?=\)))")
FENCE = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)


def find_target(page: Path, link: str) -> Path | None:
    """Return the file or folder that a relative link of a page leads to, None for other links."""
    target = Path(os.path.normpath(page.parent / link))
    if "://" in link or link.startswith("mailto:") or not target.exists():
        return None
    return target


def find_outside_files() -> list[Path]:
    """Return the files and folders outside docs/ that pages lead to, over other files or not."""
    paths: list[Path] = []
    pages = sorted(DOCS.rglob("*.md"))
    while pages:
        page = pages.pop()
        for link, _ in LINK.findall(page.read_text(encoding="utf8")):
            target = find_target(page, link)
            if target is None or target in paths or target.is_relative_to(DOCS):
                continue
            paths.append(target)
            if target.is_dir():
                paths += [path for path in list_folder(target) if path not in paths]
            if target.suffix == ".md":
                pages.append(target)
    return sorted(paths)


def list_folder(folder: Path) -> list[Path]:
    """Return the files of a folder that the site shows."""
    return sorted(path for path in folder.iterdir() if path.suffix in LANGUAGES)


def name_page(path: Path) -> str:
    """Return the path of a file's page in the site, e.g. repository/examples/tools.py.md."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"{OUTSIDE}/{name}/index.md"
    if path.suffix != ".md":
        name += ".md"
    return f"{OUTSIDE}/{name}"


def rewrite_links(text: str, page: Path) -> str:
    """Lead the relative links of a page to the pages of the site."""
    folder = os.path.dirname(name_page(page))

    def rewrite(link: re.Match[str]) -> str:
        target = find_target(page, link[1])
        if target is None:
            return link[0]
        return os.path.relpath(name_page(target), folder) + link[2]

    parts = FENCE.split(text)  # every second part is a code block
    return "".join(part if i % 2 else LINK.sub(rewrite, part) for i, part in enumerate(parts))


def write_outside_page(path: Path) -> str:
    """Return the Markdown of a file or folder outside docs/."""
    if path.suffix == ".md":
        return rewrite_links(path.read_text(encoding="utf8"), path)
    title = f"# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        return title + "".join(f"- [{file.name}]({file.name}.md)\n" for file in list_folder(path))
    return (
        f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf8')}````\n"
    )


def read_navigation(index: str) -> list[dict[str, Any]]:
    """Return mkdocs' `nav`: headings of the index, bold lines below them, and their links."""
    nav: list[dict[str, Any]] = [{"Start": "README.md"}]
    section: list[dict[str, Any]] = []
    group = section
    for line in index.splitlines():
        if heading := re.match(r"## ([^:]+)", line):
            section = []
            group = section
            nav.append({heading[1]: section})
        elif bold := re.fullmatch(r"\*\*(.*)\*\*", line):
            group = []
            section.append({bold[1]: group})
        elif line.startswith(("- ", "  ")):
            for title, link in re.findall(r"\[(.*?)\]\((.*?)\)", line):
                target = find_target(INDEX, link)
                if target is None:
                    raise ValueError(f"docs/README.md links to {link}, which does not exist")
                if " " in title:  # "add a parser", not "systemd"
                    title = title[0].upper() + title[1:]
                group.append({title: name_page(target)})
    return nav


def on_config(config: Any) -> Any:
    """Set the navigation. mkdocs calls this first."""
    config["nav"] = read_navigation(INDEX.read_text(encoding="utf8"))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of files outside docs/, mermaid, which draws diagrams, and the style."""
    file_type = importlib.import_module("mkdocs.structure.files").File
    inclusion = importlib.import_module("mkdocs.structure.files").InclusionLevel.NOT_IN_NAV
    for path in find_outside_files():
        content = write_outside_page(path)
        files.append(
            file_type.generated(config, name_page(path), content=content, inclusion=inclusion)
        )
    for asset in (MERMAID, STYLE):
        name = f"assets/{asset.name}"
        files.append(file_type.generated(config, name, abs_src_path=str(asset)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page of docs/."""
    if page.file.src_uri.startswith(f"{OUTSIDE}/"):
        return markdown
    return rewrite_links(markdown, DOCS / page.file.src_uri)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Load mermaid on a page with a diagram; the theme would get it from elsewhere."""
    if 'class="mermaid"' not in output:
        return output
    root = os.path.relpath(".", os.path.dirname(page.file.dest_uri) or ".")
    return output.replace("</head>", f'<script src="{root}/assets/mermaid.min.js"></script></head>')
