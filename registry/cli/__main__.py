"""`python -m registry.cli`: the same as `sluicegate`."""

from registry.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
