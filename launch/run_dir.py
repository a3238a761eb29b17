"""python -m launch run-dir RECIPE [section.key=value ...]

Prints the run folder of a recipe.
"""

import sys

from hybrid_megatron.config import load_recipe
from hybrid_megatron.errors import exit_with_code_2
from launch.words import help_if_asked


def main(words: list[str]) -> None:
    help_if_asked(__doc__, words)
    with exit_with_code_2():
        print(load_recipe(words).run_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
