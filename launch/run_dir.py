"""python -m launch run-dir RECIPE [section.key=value ...]

Prints the run folder of a recipe.
"""

import sys

from hybrid_megatron.config import load_recipe
from hybrid_megatron.errors import exit_with_code_2


def main(words: list[str]) -> None:
    if not words or {"-h", "--help"} & set(words):
        print(__doc__.strip())
        raise SystemExit(0 if words else 2)
    with exit_with_code_2():
        print(load_recipe(words).run_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
