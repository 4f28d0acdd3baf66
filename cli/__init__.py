"""The command line: click commands without logic of their own, one file per command group."""
