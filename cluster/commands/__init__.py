"""What each command of the command line does: `run(arguments) -> exit code`. Imported when a command is called, not before."""
