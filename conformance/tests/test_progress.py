"""What a run shows while it goes on: a bar on a terminal, lines elsewhere, and never more than was asked for."""

from __future__ import annotations

import io
import sys

import pytest

from core_numpy.contract.progress import Progress, fit_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


REPORT = {"tokens": 64, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1}


def terminal_of(monkeypatch) -> Terminal:
    """Standard output and error as one terminal; from inside a test, since pytest sets them anew before each."""
    monkeypatch.setenv("TERM", "xterm")
    shown = Terminal()
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, shown)
    return shown


def test_on_a_terminal_a_bar_goes_on_with_each_update_and_sentences_stand_above_it(monkeypatch):
    pytest.importorskip("rich")
    terminal = terminal_of(monkeypatch)
    progress = Progress(0, 2, as_json=False, plain=False, share=1e-3)
    progress.row(1, REPORT)
    progress.message("half of it [done]")
    progress.row(2, REPORT)
    progress.close()
    shown = terminal.getvalue()
    assert "2/2" in shown and "loss 2.0000  bits/byte 2.8854" in shown and "half of it [done]" in shown
    assert "step " not in shown  # no lines beside it


def test_fit_draws_its_bar_on_a_terminal_and_takes_it_away(monkeypatch):
    pytest.importorskip("rich")
    terminal = terminal_of(monkeypatch)
    with fit_bar(2, True) as show:
        show(REPORT)
        show(REPORT)
    assert "loss 2.0000" in terminal.getvalue() and "100%" in terminal.getvalue()
    drawn = len(terminal.getvalue())
    with fit_bar(2, False) as show:
        show(REPORT)
    assert len(terminal.getvalue()) == drawn


def test_an_error_ends_the_bar(monkeypatch):
    pytest.importorskip("rich")
    terminal = terminal_of(monkeypatch)
    with pytest.raises(ZeroDivisionError), fit_bar(2, True) as show:
        show(REPORT)
        raise ZeroDivisionError
    shown = terminal.getvalue()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def test_without_rich_there_are_lines_and_fit_is_silent(monkeypatch):
    terminal = terminal_of(monkeypatch)
    for module in ("rich.progress", "rich.console"):
        monkeypatch.setitem(sys.modules, module, None)
    progress = Progress(0, 1, as_json=False, plain=False)
    progress.row(1, REPORT)
    progress.close()
    assert terminal.getvalue().startswith("step     1/1  loss 2.0000")
    drawn = len(terminal.getvalue())
    with fit_bar(1, True) as show:
        show(REPORT)
    assert len(terminal.getvalue()) == drawn
