"""The command line: click commands, one file a command group, without logic of their own."""
