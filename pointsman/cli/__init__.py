"""The `pointsman` command: one module per command, each with `add(commands)` and `run(args) -> exit code`.

Exit codes: 0 success, 1 problems were found, 2 wrong usage. Modules import heavy dependencies
inside `run`, so that help appears at once.
"""
