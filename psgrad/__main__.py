"""`python -m psgrad` is `psgrad`."""

from psgrad.cli import main

if __name__ == "__main__":
    main()
