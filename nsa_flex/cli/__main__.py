"""`python -m nsa_flex.cli`: the command, for launchers such as torchrun."""

from nsa_flex.cli import main

main()
