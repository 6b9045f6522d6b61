"""``python -m fedjax_pfl`` is ``fedjax-pfl``."""

from fedjax_pfl.cli.commands import main

main()
