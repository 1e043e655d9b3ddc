"""Runs megasched's command line as ``python -m megasched``."""

from megasched.cli.main import main

if __name__ == "__main__":
    main()
