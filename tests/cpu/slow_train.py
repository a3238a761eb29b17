"""python -m tests.cpu.slow_train SECONDS WORDS: the train command with files of checkpoints that take so much longer to write."""

import sys

from launch import train
from tests.cpu.checkpoint_cells import slow_writers

if __name__ == "__main__":
    with slow_writers(float(sys.argv[1])):
        train.main(sys.argv[2:])
