"""The tables of FedCPD: ``python benchmarks/fedcpd_tables.py table1 --seeds 0,1,2``; see ``tables``."""

from pathlib import Path

from tables import main

if __name__ == "__main__":
    main(Path(__file__).parent / "papers" / "fedcpd.toml")
