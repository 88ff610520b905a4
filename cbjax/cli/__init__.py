"""The command line. Each command is a module with `add_parser` and `run`; the heavy imports are in `run`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from cbjax.cli import generate, replay, simulate
from cbjax.cli.usage import UsageError as UsageError

_COMMANDS = {"generate": generate, "replay": replay, "simulate": simulate}


def build_parser() -> argparse.ArgumentParser:
    """The parser; making it imports neither jax nor anything else that is slow."""
    from cbjax import __version__

    about = "Continuous-batching inference for JAX."
    parser = argparse.ArgumentParser(prog="cbjax", description=about, epilog=generate.EXAMPLE)
    parser.add_argument("--version", action="version", version=f"cbjax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in _COMMANDS.items():
        command.add_parser(commands, name)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 if a request or the run failed, 2 for bad usage, 130."""
    args = build_parser().parse_args(argv)
    logger = logging.getLogger("cbjax")
    level = logger.level
    # Refused requests are told at the end; the library's own warning would say it twice.
    logger.setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows another, and goes on
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return _COMMANDS[args.command].run(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except UsageError as error:
        print(f"cbjax: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        print(f"cbjax: {error}", file=sys.stderr)
        return 1
    finally:
        logger.setLevel(level)
