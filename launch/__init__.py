"""Commands a person types, from the checkout: `python -m launch COMMAND ...`."""
