"""Print what CHANGELOG.md says of a version: `python -m tools.release_notes v0.2.0`."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def find_notes(changelog: str, version: str) -> str:
    """Return the text below the heading `## [version]`; exit if it or the text is missing."""
    for section in re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if heading.startswith(f"[{version}]") and text.strip():
            return text.strip()
    sys.exit(f"CHANGELOG.md has nothing under `## [{version}]`: rename `## [Unreleased]`")


def check_version(version: str) -> None:
    """Exit if a tag and servd/__init__.py name different versions."""
    source = (ROOT / "servd/__init__.py").read_text()
    if f'"{version}"' not in source:
        sys.exit(f"the tag names version {version}, servd/__init__.py another one")


if __name__ == "__main__":
    version = sys.argv[1].removeprefix("v")
    check_version(version)
    print(find_notes((ROOT / "CHANGELOG.md").read_text(), version))
