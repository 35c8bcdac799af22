"""The README: its code and commands run, its links lead somewhere."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import eigenstream as es
from eigenstream.cli import app

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_code_in_the_readme_prints_what_its_comments_say(capsys, tmp_path, monkeypatch):
    """Every print in the README has its output in a comment, up to a colon."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 7
    names: dict = {}
    for block in blocks:
        exec(block, names)
    printed = capsys.readouterr().out.splitlines()
    promised = [line.split("  # ")[1] for block in blocks for line in block.splitlines() if line.startswith("print(")]
    assert len(printed) == len(promised)
    for line, promise in zip(printed, promised, strict=True):
        if promise.startswith("below "):
            assert float(line) < float(promise.split()[1].rstrip(";"))
        else:
            assert line == promise.split(": ")[0]
    assert names["x_scores"].shape == names["y_scores"].shape == (10_000, 2)


@pytest.mark.slow
def test_the_commands_in_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "xy":
        np.save(f"{name}.npy", np.random.default_rng(0).normal(size=(200, 4)))
    text = (ROOT / "README.md").read_text()
    commands = [line.split("#")[0].split() for line in re.findall(r"^eigenstream .*$", text, re.M)]
    assert len(commands) == 4
    for command in commands:
        assert CliRunner().invoke(app, command[1:], catch_exceptions=False).exit_code == 0
    assert np.load("scores.npy").shape == (200, 2)


def test_public_names_have_docstrings_with_examples():
    for module in (es, es.metrics, es.problems, es.solvers):
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing) and name not in ("Problem", "Products", "State", "Info", "Result"):
                assert thing.__doc__, name
            if callable(thing) and name[0].islower() and name not in ("direction", "gradient"):
                assert ">>>" in thing.__doc__, name


@pytest.mark.parametrize("name", ["LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "docs/decisions.md"])
def test_links_of_the_readme_lead_somewhere(name):
    assert (ROOT / name).exists()
