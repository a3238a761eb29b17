"""How fast recipes train, beside what one would run instead: `python -m launch bench`. Each measurement is a process of its own."""
