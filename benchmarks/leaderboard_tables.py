"""All methods under PFLlib's protocol: ``python benchmarks/leaderboard_tables.py mlp --seeds 0,1,2``."""

from pathlib import Path

from tables import main

if __name__ == "__main__":
    main(Path(__file__).parent / "papers" / "leaderboard.toml")
