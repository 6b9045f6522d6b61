"""Methods of several papers under one protocol: ``python benchmarks/comparison_tables.py comparison --seeds 0,1,2``."""

from pathlib import Path

from tables import main

if __name__ == "__main__":
    main(Path(__file__).parent / "papers" / "comparison.toml")
