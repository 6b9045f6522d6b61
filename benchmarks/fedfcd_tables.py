"""The tables of FedFCD: ``python benchmarks/fedfcd_tables.py table1 --seeds 0,1,2``; see ``tables``."""

from pathlib import Path

from tables import main

if __name__ == "__main__":
    main(Path(__file__).parent / "papers" / "fedfcd.toml")
