"""The ``dmt-compile`` command."""


def main() -> int:
    return 0
