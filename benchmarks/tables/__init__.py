"""Runs the experiments behind a paper's tables, and compares our figures with the paper's.

    python benchmarks/fedecouple_tables.py table2 --settings cifar10_s20 --seeds 0,1,2

``papers/<paper>.toml`` holds a paper's tables: settings, rows (methods, or the variants of an ablation) and figures.
``[controls]`` are rows of every table; a table with ``controls`` has only those named there. ``headline`` says whether
figures are of the last or of the best round, and ``columns`` what they measure (see `COLUMNS`; by default the accuracy
of the personal models).

A cell is one run: a row in a setting with a seed. ``results/<name>.json`` is rewritten after every program (the seeds
of a row), and a cell in it is run again only if its resolved config has changed. So a table can be filled by several
calls, one after the other or, with other rows, side by side. With ``--work FOLDER``, runs leave checkpoints there, and
an interrupted call continues in the middle of its runs, to the bit. A change of the code is not noticed; use another
``--name`` after one. ``results/<name>.md`` shows all cells so far. ``--plan`` writes it anew, and shows what a call
would run, and why, but runs nothing. It builds no program, either: it also lists rows that the model does not allow,
and its page lacks the reasons for these.
"""

from .command import main

__all__ = ["main"]
