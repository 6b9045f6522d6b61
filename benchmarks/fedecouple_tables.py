"""The tables of FedeCouple: ``python benchmarks/fedecouple_tables.py table2 --seeds 0,1,2``; see ``tables``."""

from pathlib import Path

from tables import main

if __name__ == "__main__":
    main(Path(__file__).parent / "papers" / "fedecouple.toml")
