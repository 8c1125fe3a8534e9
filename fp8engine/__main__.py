"""`python -m fp8engine`: the command line."""

from fp8engine.cli import main

if __name__ == "__main__":
    main()
