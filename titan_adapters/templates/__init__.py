"""Complete small models for `titan-adapters new` to copy: `MyModel` in `my_model.py`, under other names."""
