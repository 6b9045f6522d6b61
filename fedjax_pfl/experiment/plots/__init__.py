"""Pictures of runs, for papers and notebooks."""
