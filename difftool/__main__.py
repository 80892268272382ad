"""`python -m difftool` is the command line."""

from difftool.cli import main

if __name__ == "__main__":
    main()
