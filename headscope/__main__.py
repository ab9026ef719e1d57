"""`headscope` and `python -m headscope`: Ctrl-C is answered before anything else is loaded."""

from headscope.interrupt import answer_at_once


def main() -> None:
    """Run the command line and exit with its code."""
    answer_at_once()
    from headscope.cli import main as run

    run()


if __name__ == "__main__":
    main()
