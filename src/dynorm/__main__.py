"""``python -m dynorm``: the command line."""

from dynorm.cli import main

if __name__ == "__main__":
    main()
