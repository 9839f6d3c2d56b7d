"""`python -m diloco_cli` is `diloco`."""

from diloco_cli.cli.interpreter import refuse_old_python

if __name__ == "__main__":
    refuse_old_python()
    from diloco_cli.cli.app import main

    main()
