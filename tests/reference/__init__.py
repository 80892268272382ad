"""Slow, obvious oracles written from the formulas; they import nothing from difftool."""
