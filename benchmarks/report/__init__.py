"""Writes docs/performance.md and its pictures from what was measured."""

from __future__ import annotations

from collections.abc import Callable
from string import Template

from benchmarks.environments import RESULTS
from benchmarks.machine import ROOT
from benchmarks.report import sections, summary

__all__ = ["write"]

PAGE = ROOT / "docs" / "performance.md"
PICTURES = ROOT / "docs" / "performance"
SECTIONS: dict[str, Callable[[], str]] = {
    name: getattr(module, name) for module in (summary, sections) for name in module.__all__
}


def write() -> None:
    """From the template beside this file. A part that was not run leaves its table empty."""
    from benchmarks.report.plots import draw  # here, since figures are also shown where there is no matplotlib

    text = Template((ROOT / "benchmarks" / "report" / "page.md").read_text())
    found = {name: section() for name, section in SECTIONS.items()}
    pictures = {name.replace("-", "_"): f"![{name}](performance/{name}.svg)" for name in draw(PICTURES)}
    plots = {f"{name}_plot": link for name, link in pictures.items()}
    blank = {name: "" for name in text.get_identifiers() if name.endswith("_plot")}
    PAGE.write_text(text.substitute(blank | plots | found))
    print(f"{PAGE.relative_to(ROOT)}, from {RESULTS}")
