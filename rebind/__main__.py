"""`python -m rebind` is the command `rebind`."""

from rebind.cli import main

if __name__ == "__main__":
    main()
