"""``python -m megasched``."""

from megasched.cli import main

if __name__ == "__main__":
    main()
