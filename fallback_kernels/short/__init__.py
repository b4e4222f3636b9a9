"""Documents so short that every block is selected: all branches in one forward kernel."""
