"""The `pointsman` command: one module per command, each with `add(commands)` and `run(args) -> exit code`.

Exit codes: 0 all is well, 1 problems were found, 2 the command was used wrongly. Modules import heavy dependencies
inside `run`, so that help appears at once.
"""
