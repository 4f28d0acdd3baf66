from command_line import command, run, run_process

__all__ = ["command", "run", "run_process"]
