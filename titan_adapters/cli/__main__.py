"""`python -m titan_adapters.cli`, where the command is not on the path."""

from titan_adapters.cli import main

main()
