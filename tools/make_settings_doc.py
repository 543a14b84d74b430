"""Writes docs/settings.md from the schema; with --check it only compares.

Owns the layout of that page. The words are those of megarl/config/schema.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megarl.config.render import toml_value
from megarl.config.settings import Setting, setting_groups

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

Made by `tools/make_settings_doc.py` from `megarl/config/schema.py`; `make docs` writes it anew.
In a file a setting stands under its group, `[rollout.sampling]` and `temperature = 1.0`; on the
command line it is `--rollout.sampling.temperature 1.0`. Units end a name:
`_s` seconds, `_tokens` tokens.
"""


def settings_page() -> str:
    """The page's text."""
    lines = [HEAD]
    for group in setting_groups():
        lines += [f"## {group.name}", "", _cell(group.doc), ""]
        lines += ["| setting | takes | default | meaning |", "|---|---|---|---|"]
        lines += [_row(setting) for setting in group.settings]
        lines.append("")
    return "\n".join(lines)


def _row(setting: Setting) -> str:
    default = "required" if setting.required else f"`{toml_value(setting.default)}`"
    name = setting.name.rpartition(".")[2]
    return f"| `{name}` | {_cell(setting.values)} | {default} | {_cell(setting.doc)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """0 where the page is current or was written, 1 where --check found it old."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        PAGE.write_text(settings_page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == settings_page():
        return 0
    print(f"{PAGE.name} is not what the schema says; run `make docs`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
