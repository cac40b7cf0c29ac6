"""How a program starts and ends.

Every program is `def main(): program.run(_main, ...)`. `run` settles the host allocator, moves to the folder the user
stands in, parses flags and turns errors into exit codes: 0 done, 2 bad flag, config or input (`config.Error`), 1 anything
else (`config.Failure` in one line, a bug with its traceback).

This module imports nothing heavy: a program that restarts itself under another allocator must not pay for jax twice.
"""
